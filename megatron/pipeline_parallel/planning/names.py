"""The name of every schedule that the design knows; those built so far are `builders.names()`."""

DESIGNED = tuple(
    "gpipe 1f1b interleaved-1f1b zb-h1 zb-h2 zb-auto zbv v-half v-min v-auto 1f1b-v dualpipe-v "
    "gis gis-h po seq-1f1b auto".split()
)

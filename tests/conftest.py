"""The `--full` option and the `full` marker: long tests run only when they are asked for."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", default=False, help="also run the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a long test, skipped unless --full is given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long: runs with --full")
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(skip)

"""One JupyterLab and one browser for all browser tests; without a browser they skip."""

from collections.abc import Iterator

import pytest

from tests.browser.rig import CHROMIUM, Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium, or name one in CHROMIUM)")
    for package in ("playwright", "jupyterlab", "anywidget"):
        pytest.importorskip(package)
    with Lab() as running:
        yield running

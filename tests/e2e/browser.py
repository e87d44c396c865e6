"""A page as a reader sees it: opened in headless Chromium, at the width of a desk and of a phone."""

import shutil
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = {"desk": 1200, "phone": 390}

_SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def opened(path: Path, width: int):
    """Open a file; yields the page and the list of its console errors and failed requests, which fills up.

    Any request that is not for the file itself fails, as it would without a network.
    """
    executable = shutil.which("chromium")
    assert executable, "expected Chromium on the path. Type: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_SWITCHES))
        try:
            page = browser.new_page(viewport={"width": width, "height": 900})
            errors: list[str] = []
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("requestfailed", lambda request: errors.append(f"request failed: {request.url[:100]}"))
            page.route("**/*", lambda route: route.continue_() if _local(route.request.url) else route.abort())
            page.goto(path.resolve().as_uri())
            yield page, errors
        finally:
            browser.close()


def _local(url: str) -> bool:
    return url.startswith(("file:", "data:"))

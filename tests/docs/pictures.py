"""Takes the pictures of the documentation: a run of the demo's model, its report, and a real browser's screenshots.

make pictures
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.conftest import ARRIVED, CHROMIUM, Opened
from tests.kit.paths import REPOSITORY

PICTURES = REPOSITORY / "docs" / "pictures"
QUALITY = 80


class Picture(NamedTuple):
    """A screenshot.

    place: An address within the report, "" for the page that opens.
    choices: The options to choose there, by their labels.
    """

    name: str
    place: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    width: int = 1280
    height: int = 800
    theme: str = "light"
    locale: str = "en-GB"


SHOTS = (
    Picture("report-light"),
    Picture("report-dark", theme="dark"),
    Picture("report-zh", locale="zh-CN"),
    Picture("report-phone", width=400, height=800),
    Picture("report-wide", "tensors", width=1600, height=700),
    Picture("errors", "errors", choices=(("format", "mxfp8"),), height=720),
    Picture("distributions", "distributions", height=720),
)


def captured(directory: Path) -> Path:
    """Return the report of a captured run of the demo's model on two ranks."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    capd, torchrun = ["-m", "capd"], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    model = [str(REPOSITORY / "examples" / "train_text.py"), "--steps", "4", "--capture-steps", "0,3"]
    for command in (
        [*capd, "run", "--run-id", "demo", "--policy", "block", "--", sys.executable, *torchrun, *model],
        [*capd, "report", "captures/demo.zarr", "-o", "report.html"],
    ):
        subprocess.run([sys.executable, *command], cwd=directory, env=environ, check=True)
    return directory / "report.html"


def screenshot(browser: Any, report: Path, picture: Picture) -> bytes:
    """Return a PNG of a part of the report as a browser shows it."""
    context = browser.new_context(
        offline=True,
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=picture.theme,
        locale=picture.locale,
    )
    context.add_init_script(ARRIVED)
    opened = Opened(context.new_page(), report.as_uri())
    opened.page.goto(opened.address)
    opened.page.wait_for_selector("main section")
    if picture.place:
        opened.go(picture.place)
    for label, option in picture.choices:
        opened.choose(label, option)
    opened.settle()
    png = opened.page.screenshot()
    context.close()
    return bytes(png)


def main() -> None:
    """Write the pictures, each as WebP, and print their sizes."""
    PICTURES.mkdir(exist_ok=True)
    if CHROMIUM is None:
        sys.exit("no chromium on the PATH; install Debian's package chromium")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        report = captured(Path(directory))
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for picture in SHOTS:
            path = PICTURES / f"{picture.name}.webp"
            Image.open(io.BytesIO(screenshot(browser, report, picture))).save(path, quality=QUALITY, method=6)
            print(f"{path.relative_to(REPOSITORY)}  {path.stat().st_size / 1024:.0f} KiB")
        browser.close()


if __name__ == "__main__":
    main()

"""The page that `pie simulate` writes, as a browser lays it out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pie.cluster.cli import app

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
TRACE = "arrival_s,prompt_tokens,output_tokens,session\n" + "".join(
    f"{at * 0.3},{600 + 40 * at},20,s{at % 3}\n" for at in range(60)
)
LOOK = """<script>
const box = (one) => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] }
const seen = {
  overflows: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  cells: [...document.querySelectorAll("tbody tr")].map((row) =>
    [...row.children].map((cell) => cell.textContent)),
  legends: [...document.querySelectorAll(".legend")].map((one) => ({
    box: box(one), names: [...one.children].map((name) => ({ text: name.textContent, box: box(name) })) })),
  plots: [...document.querySelectorAll("svg")].map((svg) => ({
    box: box(svg), label: svg.getAttribute("aria-label"),
    lines: [...svg.querySelectorAll("polyline")].map((line) => ({
      length: line.getTotalLength(), box: box(line), stroke: getComputedStyle(line).stroke })),
    bars: [...svg.querySelectorAll("rect")].map((bar) => ({
      box: box(bar), fill: getComputedStyle(bar).fill })),
    words: [...svg.querySelectorAll("text")].map((text) => ({
      text: text.textContent, box: box(text), fill: getComputedStyle(text).fill })),
  })),
}
const told = document.createElement("pre")
told.id = "told"
told.textContent = JSON.stringify(seen)
document.body.append(told)
</script></body>"""

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium here"),
]


def within(inner: list[float], outer: list[float]) -> bool:
    """Say whether a box lies in another, but for a pixel of its border."""
    left, top, width, height = outer
    return (
        inner[0] >= left - 1
        and inner[1] >= top - 1
        and inner[0] + inner[2] <= left + width + 1
        and inner[1] + inner[3] <= top + height + 1
    )


def apart(one: list[float], other: list[float]) -> bool:
    """Say whether two boxes have no pixel in common."""
    return any(
        one[at] + one[at + 2] <= other[at] + 0.5 or other[at] + other[at + 2] <= one[at] + 0.5
        for at in (0, 1)
    )


def test_its_plots_and_numbers_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    long = "-".join(["a", *["long"] * 20, "name"])
    Path(f"{long}.yaml").write_text("cluster: {routing: round-robin}")
    arguments = (
        *("simulate", "--trace", "trace.csv", "--compare", f"{long}.yaml", "--page-tokens", "16"),
        *("--pages", "400", "--workers", "2", "--json", "out.json", "--html", "out.html"),
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = Path("out.html").read_text()
    Path("looked.html").write_text(page.replace("</body>", LOOK))
    assert BROWSER is not None
    shown = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--window-size=1200,2400", f"--user-data-dir={tmp_path}/browser"),
            *("--dump-dom", f"file://{tmp_path}/looked.html"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    found = re.search(r'<pre id="told">(.*?)</pre>', shown, re.DOTALL)
    assert found is not None
    seen = json.loads(unescape(found[1]))
    reports = json.loads(Path("out.json").read_text())

    assert not seen["overflows"]
    cells = {label: values for label, *values in seen["cells"]}
    assert cells["hit rate"] == [f"{one['hit_rate']:.4f}" for one in reports]
    assert cells["requests"] == ["60", "60"]
    assert cells["time to first token, mean"] == [
        f"{one['ttft_s']['mean']:.3f} s" for one in reports
    ]

    assert len(cells) == len(seen["cells"]), "no two figures have one name"

    assert len(seen["plots"]) == len(seen["legends"]) == 4
    for legend in seen["legends"]:
        assert [name["text"] for name in legend["names"]] == ["built-in", long]
        assert all(within(name["box"], legend["box"]) for name in legend["names"])
    for plot in seen["plots"]:
        assert plot["box"][2] > 600
        assert plot["box"][3] > 150
        assert all(within(word["box"], plot["box"]) for word in plot["words"])
        for at, word in enumerate(plot["words"]):
            assert all(apart(word["box"], other["box"]) for other in plot["words"][:at]), word
        assert long in plot["label"], "it is told to whoever does not see it"
        assert len([word for word in plot["words"] if word["text"].strip()]) >= 4
    *curves, bars = seen["plots"]
    for plot in curves:
        strokes = [line["stroke"] for line in plot["lines"]]
        assert len(set(strokes)) == len(reports), "one colour for each"
        assert "none" not in strokes
        assert all(line["length"] > 500 for line in plot["lines"]), "from the left to the right"
        assert all(within(line["box"], plot["box"]) for line in plot["lines"])
    assert len(bars["bars"]) == 4, "two workers, twice"
    assert all(within(bar["box"], bars["box"]) for bar in bars["bars"])
    assert all(bar["box"][3] > 5 for bar in bars["bars"])
    assert len({bar["fill"] for bar in bars["bars"]}) == len(reports)

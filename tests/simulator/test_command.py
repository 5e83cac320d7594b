"""What `pie simulate` writes, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from pie.simulator import peers
from pie.simulator.calibration import Observed, fit, observe
from pie.simulator.command import SimulateOptions, read_cost_model, simulate
from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError
from pie.simulator.plots import html_page
from pie.simulator.report import Report, quantile, report_of
from pie.simulator.svg import Line, bars, lines
from pie.worker.load_choice import LoadTier
from tests.simulator.parts import ask, cluster, spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulator.md"
HEAD = "arrival_s,prompt_tokens,output_tokens,session\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    rows = (f"{at * 0.05},{20 + at},{1 + at % 5},s{at % 3}\n" for at in range(40))
    file.write_text(HEAD + "".join(rows))
    return file


def test_two_sets_of_policies_are_told_and_written_side_by_side(
    tmp_path: Path, trace: Path
) -> None:
    even = tmp_path / "even.yaml"
    even.write_text("cluster: {routing: round-robin}")
    told: list[str] = []
    options = SimulateOptions(
        trace,
        [None, even],
        spec(),
        json_file=tmp_path / "out.json",
        html_file=tmp_path / "out.html",
    )
    reports = simulate(options, lambda report: told.append(report.name))
    assert told == ["built-in", "even"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert msgspec.convert(written, list[Report]) == reports
    assert written[0]["hit_rate"] > written[1]["hit_rate"]
    before = (tmp_path / "out.json").read_bytes()
    simulate(options, lambda _: None)
    assert (tmp_path / "out.json").read_bytes() == before


def test_rules_of_other_routers_are_tried_beside_by_one_option(trace: Path) -> None:
    reports = simulate(SimulateOptions(trace, [None], spec(), peers=True), lambda _: None)
    assert [one.name for one in reports] == ["built-in", *peers.NAMES]
    assert not any(one.policy_failures for one in reports)
    spread = {tuple(worker.requests for worker in one.workers) for one in reports}
    assert len(spread) > 1, "they do not all choose alike"


def test_the_page_loads_nothing_and_names_every_set_of_policies() -> None:
    simulated = cluster()
    simulated.run_open([ask(at * 0.1, (1, 20), (at, 4)) for at in range(2, 30)])
    page = html_page(
        "<title>", [report_of(name, simulated) for name in ("a & b", "peers:SglangThreshold")]
    )
    assert not re.search(r"src=|href=|url\(|@import|<script", page)
    assert "a &amp; b" in page
    assert "peers:<wbr>Sglang<wbr>Threshold</th>" in page
    assert page.count("<svg") == 4
    assert page.count("<polyline") == 6
    assert "nan" not in page
    assert "<title></title>" not in page
    assert page.count('role="img" aria-label="') == 4


def test_plots_of_nothing_and_of_one_value_are_drawn() -> None:
    assert "Nothing" in lines([], x_label="x", y_label="y")
    assert "Nothing" in bars([], y_label="y")
    assert "Nothing" in lines(
        [Line("a", [(0, 0)], "red")], x_label="", y_label="", logarithmic=True
    )
    assert "<circle" in lines([Line("a", [(1, 5)], "red")], x_label="", y_label="")
    assert "<rect" in bars([("a", [0.0, 3.0], "red")], y_label="y")


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert [quantile([1.0, 2.0, 4.0], at) for at in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 4.0]
    assert quantile([], 0.5) == 0.0


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, trace: Path) -> None:
    options = SimulateOptions(trace, cluster=spec(), json_file=tmp_path / "none" / "out.json")
    with pytest.raises(SetupError, match=r"out\.json: cannot be written: No such file"):
        simulate(options, lambda _: None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a cost model"),
        (
            '{"prefill_tokens_per_sec": 1, "load": 2}',
            "no field 'prefill_tokens_per_sec', did you mean .*, 'load', .* allowed are .*, `decode_step_ms`",
        ),
        ("[]", "Expected `object`, got `array`"),
        ('"\\ud800"', "is not a cost model"),
        ('{"prefill_tokens_per_s": "fast"}', "Expected `float`"),
        (
            '{"prefill_tokens_per_s": -1}',
            "prefill_tokens_per_s must be from 1 to 1,000,000,000,000, not -1",
        ),
        ('{"prefill_tokens_per_s": 1e-300}', "prefill_tokens_per_s must be from 1 to"),
        (
            '{"decode_step_ms": 1e12}',
            "decode_step_ms must be from 0 to 60,000, not 1000000000000.0",
        ),
        (
            '{"load_tokens_per_s": {"dsk": 1}}',
            "no tier in `load_tokens_per_s` 'dsk', did you mean 'disk'\\?; allowed are `host`, `disk`, `pool`$",
        ),
    ],
)
def test_a_bad_cost_model_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(SetupError, match=said):
        read_cost_model(file)


def test_a_cost_model_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    model = CostModel(prefill_tokens_per_s=5.0, load_tokens_per_s={LoadTier.HOST: 7.0})
    file.write_bytes(msgspec.json.encode(model))
    assert read_cost_model(file) == model
    assert model.load_s(LoadTier.HOST, 14) == pytest.approx(2.002)


def test_a_model_is_fitted_from_what_a_worker_of_that_speed_shows() -> None:
    speed = CostModel(prefill_tokens_per_s=2_000.0, decode_step_ms=50.0, decode_sequence_ms=2.0)

    def ask_worker(ids: object, max_tokens: int, choices: int) -> list[float]:
        first_s = 0.03 + len(ids) / 2_000.0  # type: ignore[arg-type]
        step_s = speed.step_s(0, choices)
        return [first_s + at * step_s for at in range(max_tokens) for _ in range(choices)]

    fitted = fit(observe(ask_worker, Random(1)))
    assert fitted.prefill_tokens_per_s == pytest.approx(2_000.0)
    assert fitted.decode_step_ms == pytest.approx(50.0)
    assert fitted.decode_sequence_ms == pytest.approx(2.0)


def test_a_cluster_too_busy_to_be_measured_is_told() -> None:
    with pytest.raises(SetupError, match="longer prompts took no longer"):
        fit(Observed([(64, 2.0), (256, 1.0), (512, 1.5)], 0.1, 0.2, 8))


def names_in(value: object) -> set[str]:
    """Return the keys in what a report's key holds, but for those that policies and reasons name."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    if not isinstance(value, dict):
        return set()
    named = {"by_policy", "refusals"} & value.keys()
    return set(value).union(*(names_in(one) for key, one in value.items() if key not in named))


def test_every_key_of_a_report_is_documented_and_no_other() -> None:
    of = replace(spec(workers=3, pages=60, pool_pages=90), host_pages=64, pool_nodes=2)
    policies = (
        "cluster: {replication: {policy: replicate-hot, uses: 0.1, copies: 2, after: 1s}, "
        "scale: {policy: by-load, waiting: 0.1, rise_after: 1s}}"
    )
    simulated = cluster(of, policies)
    simulated.run_open([ask(at / 20, (1, 80), (2 + at % 40, 40)) for at in range(300)])
    report = json.loads(msgspec.json.encode(report_of("x", simulated)))
    written = DOCUMENT.read_text().split("| key | what it is |")[1].split("\n\n")[0]
    rows: dict[str, str] = {}
    for keys, said in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", written, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"\w+", keys), said)
    assert set(report) == rows.keys()
    for key, value in report.items():
        if key != "policy_failures":
            undocumented = {name for name in names_in(value) if f"`{name}`" not in rows[key]}
            assert undocumented == set(), key
    assert report["orders"]["hints"]
    assert report["orders"]["bytes_moved"]
    assert report["evicted_pages"]["host"]

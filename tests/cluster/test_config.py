"""The configuration: files, environment, flags, and what is said of a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, strategies as st
from pydantic import ByteSize

from pie.cluster.config import load_config, sections
from pie.cluster.errors import ConfigError
from pie.cluster.reference import reference_page, shown


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pie.toml"
    file.write_text(text)
    return file


def problems(file: Path | None, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, environment or {})
    return caught.value.problems


def test_without_a_file_every_value_is_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(None, {})
    assert {origin for _, _, origin in loaded.values()} == {"default"}


def test_a_file_in_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "[cluster]\nworkers = 3\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_config(None, {})
    assert loaded.config.cluster.workers == 3
    assert loaded.origins["cluster", "workers"] == "pie.toml:2"


def test_the_environment_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    file = write(tmp_path, "[cluster]\nworkers = 3\n[router]\nport = 1\n")
    environment = {"PIE_CLUSTER__WORKERS": "4", "PIE_ROUTER__PORT": "2"}
    loaded = load_config(file, environment, {("router", "port"): ("--port", 3)})
    assert loaded.config.cluster.workers == 4
    assert loaded.config.router.port == 3
    assert loaded.origins["cluster", "workers"] == "PIE_CLUSTER__WORKERS"
    assert loaded.origins["router", "port"] == "--port"


def test_sizes_take_units(tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\ndevice_kv_budget = "96MiB"\n')
    assert load_config(file, {}).config.model.device_kv_budget == 96 << 20


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[cluster]\nworkers = "many"\n\n[model]\ndtipe = "float32"\n\n[modell]\nx = 1\n',
    )
    found = problems(file, {"PIE_ROUTER__PORT": "-1"})
    assert len(found) == 4
    text = "\n".join(found)
    assert f"{file}:2: cluster.workers" in text
    assert f"{file}:5: unknown key 'dtipe'; did you mean dtype?" in text
    assert f"{file}:7: unknown section 'modell'; did you mean model?" in text
    assert "PIE_ROUTER__PORT: router.port" in text


def test_an_unknown_section_in_the_environment_is_refused() -> None:
    assert (
        "PIE_MODLE__DTYPE: unknown section 'modle'; did you mean model?"
        in problems(None, {"PIE_MODLE__DTYPE": "float32"})[0]
    )


def test_a_variable_with_one_underscore_is_refused() -> None:
    assert "PIE_MODEL__DTYPE" in problems(None, {"PIE_MODEL_DTYPE": "float32"})[0]


def test_other_variables_are_passed_over() -> None:
    load_config(None, {"PIE_RUN": "x", "PIEMAN": "y", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"[model\n", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"x" * (2 << 20), "larger than 1 MiB"),
        (b"model = 3\n", "a section is wanted"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "pie.toml"
    file.write_bytes(content)
    assert what in problems(file)[0]
    assert str(file) in problems(file)[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "no.toml")[0]


@given(st.text(max_size=60))
def test_whatever_a_variable_holds_is_refused_with_a_sentence(text: str) -> None:
    environment = {"PIE_MODEL__DTYPE": text, "PIE_CLUSTER__WORKERS": text}
    assert problems(None, environment)


def test_the_reference_page_is_the_codes() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference_page(), "run: pie config reference > docs/configuration.md"


def test_every_key_has_a_description() -> None:
    for name, settings in sections().items():
        for key, field in settings.model_fields.items():
            assert field.description, f"{name}.{key}"


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    file = write(tmp_path, '[router]\napi_token = "hush"\n')
    loaded = load_config(file, {})
    assert all("hush" not in shown(value) for _, value, _ in loaded.values())


def test_a_secret_is_not_shown_by_what_is_said_of_a_mistake() -> None:
    for variables in (
        {"PIE_ROUTER__API_TOKEN": "[1234567]"},
        {"PIE_ROUTER__API_TOKEN": "1234567", "PIE_ROUTER__PORT": "none"},
        {"PIE_INDEX__URL": "http://:1234567@host"},
    ):
        assert "1234567" not in "".join(problems(None, variables))


def test_the_password_in_a_url_is_not_shown() -> None:
    assert shown("redis://:hunter2@host:6379/0") == '"redis://***@host:6379/0"'
    assert "hunter2" not in shown("redis+sentinel://a,b/pages?sentinel_password=hunter2&db=1")


NUMBERS = [
    (section, key)
    for section, settings in sections().items()
    for key, field in settings.model_fields.items()
    if {int, float, ByteSize} & {field.annotation, *get_args(field.annotation)}
]


@pytest.mark.parametrize(("section", "key"), NUMBERS)
@pytest.mark.parametrize("value", ["-1", "inf", "-inf", "nan", "1e300", "1" + "0" * 30])
def test_no_number_is_without_bounds(tmp_path: Path, section: str, key: str, value: str) -> None:
    file = write(tmp_path, f"[{section}]\n{key} = {value}\n")
    assert f"{file}:2: {section}.{key}" in problems(file)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL__THREADS", "10000"),
        ("MODEL__CONTEXT_TOKENS", "1"),
        ("MODEL__DEVICE", "gpu"),
        ("MODEL__DEVICE", "cuda:"),
        ("MODEL__ATTENTION", "fast"),
        ("MODEL__REVISION", ""),
        ("POOL__NODES", "1000"),
        ("POOL__DISK_FOLDERS", "[]"),
        ("INDEX__URL", "localhost:6379"),
        ("INDEX__KEY_PREFIX", ""),
    ],
)
def test_what_can_never_work_is_refused_with_what_is_allowed(name: str, value: str) -> None:
    (problem,) = problems(None, {f"PIE_{name}": value})
    assert problem.startswith(f"PIE_{name}: {name.lower().replace('__', '.')}: ")


def test_bounds_are_said_in_words_and_units() -> None:
    for value, variable, said in (
        ("10000", "PIE_MODEL__THREADS", "model.threads: must be at most 1024 (got '10000')"),
        ("1", "PIE_MODEL__CONTEXT_TOKENS", "model.context_tokens: must be at least 2 (got '1')"),
        ("1KiB", "PIE_MODEL__DEVICE_KV_BUDGET", "must be at least 64.0KiB"),
        ("0", "PIE_ROUTER__RETRY_AFTER_S", "must be more than 0.0"),
        ("tpu", "PIE_MODEL__DEVICE", "Where the model runs: `cpu`, `cuda`, `cuda:1`."),
    ):
        assert said in problems(None, {variable: value})[0]

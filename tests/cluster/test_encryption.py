"""Keys for pages at rest, from the environment or a file; mistakes are named and no key is shown."""

from pathlib import Path

import pytest

from pie.cluster.config import load_config
from pie.cluster.encryption import encryption_keys
from pie.cluster.errors import ConfigError
from pie.cluster.preflight import problems
from pie.cluster.settings import ClusterSettings

ONE, TWO = "11" * 32, "22" * 32


def keys_of(tmp_path: Path, file: str | None = None, **variables: str) -> tuple[bytes, ...]:
    if file is not None:
        (tmp_path / "keys").write_text(file)
        variables["PIE_CLUSTER__ENCRYPTION_KEY_FILE"] = str(tmp_path / "keys")
    (tmp_path / "empty.toml").write_text("")
    return encryption_keys(load_config(tmp_path / "empty.toml", variables).config.cluster)


def test_without_keys_nothing_is_encrypted(tmp_path: Path) -> None:
    assert keys_of(tmp_path) == ()


def test_keys_of_the_environment_come_before_those_of_the_file(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, f"# old\n\n{TWO}\n", PIE_CLUSTER__ENCRYPTION_KEYS=f"{ONE}\n")
    assert keys == (bytes.fromhex(ONE), bytes.fromhex(TWO))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("", "holds no key"),
        ("# only this\n", "holds no key"),
        (f"{ONE}\n{ONE[:-1]}\n", "keys:2: a key is 64 hexadecimal digits"),
        (f"{ONE}\n{ONE}\n", "keys:2: this key is there already"),
        ("pässword\n", "not ASCII"),
        ("".join(f"{n:064x}\n" for n in range(65)), "at most 64"),
    ],
)
def test_a_key_file_that_is_wrong_is_told_with_its_line(
    tmp_path: Path, file: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, file)
    (problem,) = caught.value.problems
    assert said in problem
    assert ONE not in problem


def test_a_key_file_that_is_not_there_keeps_the_cluster_from_starting(tmp_path: Path) -> None:
    (tmp_path / "pie.toml").write_text(f'[cluster]\nencryption_key_file = "{tmp_path}/none"\n')
    config = load_config(tmp_path / "pie.toml", {}).config
    (problem,) = [one for one in problems(config) if "encryption" in one]
    assert "No such file" in problem


def test_keys_are_not_shown() -> None:
    assert ONE not in repr(ClusterSettings(encryption_keys=ONE))  # type: ignore[arg-type]

"""What becomes of a Ray that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pie.cluster import ray_runtime
from pie.cluster.errors import StartError


@pytest.mark.parametrize(
    ("address", "said"), [("", "Ray cannot be started"), ("10.0.0.1:6379", "no Ray answers at")]
)
def test_a_ray_that_is_not_up_in_time_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, said: str
) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 – as Ray does

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(StartError, match=f"^{said}.*: The current node timed out"):
        ray_runtime.RayRuntime(address, tmp_path)

"""The compose file fits what it starts: its settings are Pie's, and its names agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pie.cluster.config import load_config
from tests.house.tree import ROOT

FILE = ROOT / "deploy/compose.yaml"


@pytest.fixture
def compose() -> Any:
    """The file as Docker would read it, every variable that it asks for set."""
    text = re.sub(r"(?<!\$)\$\{(\w+)[^}]*\}", r"a-\1", FILE.read_text("utf-8"))
    return yaml.safe_load(text)


def test_services_and_volumes_that_are_named_are_there(compose: Any) -> None:
    services, volumes = compose["services"], compose["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in volumes or (FILE.parent / source).resolve() == ROOT


def test_its_settings_are_pies_and_lead_to_the_bucket_that_it_makes(
    compose: Any, tmp_path: Path
) -> None:
    environment = compose["services"]["pie"]["environment"]
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    config = load_config(empty, environment).config
    assert config.pool.object_bucket == "pages"
    assert config.pool.object_endpoint_url == "http://minio:9000"
    assert "store/pages" in compose["services"]["bucket"]["command"][0]
    server = compose["services"]["minio"]["environment"]
    assert environment["AWS_ACCESS_KEY_ID"] == server["MINIO_ROOT_USER"]
    assert environment["AWS_SECRET_ACCESS_KEY"] == server["MINIO_ROOT_PASSWORD"]


def test_nothing_listens_beyond_this_machine(compose: Any) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))

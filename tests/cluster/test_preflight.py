"""What is found wrong before anything is started, and that all of it is told at once."""

from __future__ import annotations

import http.server
import socket
import threading
from pathlib import Path

import psutil
import pytest

from pie.cluster import preflight
from pie.cluster.config import PieConfig, load_config
from pie.cluster.errors import ConfigError, StartError
from pie.cluster.launch import running
from pie.cluster.local_s3 import LocalS3


def config(tmp_path: Path, **variables: object) -> PieConfig:
    """Return a configuration that is well but for the variables, such as `MODEL__DEVICE`."""
    settings = {
        "CLUSTER__LOG_DIR": tmp_path / "logs",
        "INDEX__DATA_DIR": tmp_path / "index",
        "MODEL__CACHE_FOLDER": tmp_path / "cache",
        "MODEL__DEVICE_KV_BUDGET": "1MiB",
        "POOL__RAM_BUDGET": "1MiB",
        "ROUTER__PORT": 0,
        **variables,
    }
    file = tmp_path / "empty.toml"
    file.write_text("")
    environment = {f"PIE_{name}": str(value) for name, value in settings.items()}
    return preflight.absolute(load_config(file, environment).config)


def test_nothing_is_wrong_with_a_good_configuration(tmp_path: Path) -> None:
    assert not preflight.problems(config(tmp_path))


@pytest.mark.parametrize("below", ["", "and/deeper"])
@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("CLUSTER__LOG_DIR", "cluster.log_dir"),
        ("MODEL__CACHE_FOLDER", "model.cache_folder"),
        ("INDEX__DATA_DIR", "index.data_dir"),
        ("POOL__DISK_FOLDERS", "pool.disk_folders"),
        ("MODEL__DISK_KV_PATH", "model.disk_kv_path"),
    ],
)
def test_a_file_where_a_folder_is_wanted_is_named(
    tmp_path: Path, variable: str, setting: str, below: str
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    value: object = path / below
    if variable == "POOL__DISK_FOLDERS":
        value = f'["{value}"]'
    (problem,) = preflight.problems(
        config(
            tmp_path,
            **{variable: value},
            POOL__DISK_BUDGET="1MiB",
            MODEL__DISK_KV_BUDGET="1MiB",
        )
    )
    assert problem.startswith(f"{setting}: {path / below} ")


@pytest.mark.parametrize(
    "variable", ["CLUSTER__LOG_DIR", "MODEL__CACHE_FOLDER", "INDEX__DATA_DIR", "MODEL__SOURCE"]
)
@pytest.mark.parametrize("path", ["/proc/nowhere/x", "/{long}"])
def test_a_path_that_cannot_be_is_one_sentence(tmp_path: Path, variable: str, path: str) -> None:
    path = path.format(long="x" * 300)
    found = preflight.problems(config(tmp_path, **{variable: path}))
    if (variable, path) == ("MODEL__CACHE_FOLDER", "/proc/nowhere/x"):
        assert not found, "only who converts a model finds that nothing can be written there"
        return
    (problem,) = found
    assert problem.startswith(variable.lower().replace("__", "."))


def test_a_path_with_a_nul_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "pie.toml"
    for section, key in (("cluster", "log_dir"), ("model", "cache_folder"), ("index", "data_dir")):
        file.write_text(f'[router]\nport = 0\n[{section}]\n{key} = "a\\u0000b"\n')
        found = preflight.problems(preflight.absolute(load_config(file, {}).config))
        assert [one for one in found if one.startswith(f"{section}.{key}")]


def test_a_home_that_nobody_has_is_no_crash(tmp_path: Path) -> None:
    for variable in ("CLUSTER__LOG_DIR", "MODEL__CACHE_FOLDER", "MODEL__SOURCE"):
        preflight.absolute(config(tmp_path, **{variable: "~nobody-at-all/x"}))


def test_paths_are_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine").mkdir()
    found = config(
        tmp_path,
        CLUSTER__LOG_DIR="~/logs",
        MODEL__CACHE_FOLDER="cache",
        MODEL__SOURCE="mine",
        POOL__DISK_FOLDERS='["a", "/b"]',
        POLICIES__FILE="p.yaml",
        INDEX__DATA_DIR="~/index",
    )
    assert found.cluster.log_dir == Path("/home/me/logs")
    assert found.model.cache_folder == tmp_path / "cache"
    assert found.model.source == str(tmp_path / "mine")
    assert found.pool.disk_folders == (tmp_path / "a", Path("/b"))
    assert found.policies.file == tmp_path / "p.yaml"
    assert found.model.disk_kv_path == tmp_path / ".pie/kv"
    assert found.index.data_dir == Path("/home/me/index")


def test_the_names_of_models_that_are_no_paths_stay(tmp_path: Path) -> None:
    for source in ("smollm2", "owner/name"):
        assert config(tmp_path, MODEL__SOURCE=source).model.source == source


def test_a_device_that_is_not_here_names_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_cuda_devices", lambda: 1)
    assert not preflight.problems(config(tmp_path, MODEL__DEVICE="cuda:0"))
    (problem,) = preflight.problems(config(tmp_path, MODEL__DEVICE="cuda:1"))
    assert problem == "model.device: there is no cuda:1 here; allowed are cpu, cuda:0"


def test_more_threads_than_cores_can_bear_says_how_many(tmp_path: Path) -> None:
    most = 4 * (psutil.cpu_count() or 1)
    assert not preflight.problems(config(tmp_path, MODEL__THREADS=most))
    (problem,) = preflight.problems(config(tmp_path, MODEL__THREADS=min(1024, most + 1)))
    assert f"at most {most} are allowed" in problem


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 300, "ü" * 70, "a b"])
def test_a_host_that_is_none_of_ours_is_one_sentence(tmp_path: Path, host: str) -> None:
    (problem,) = preflight.problems(config(tmp_path, ROUTER__HOST=host, ROUTER__API_TOKEN="secret"))
    assert "router.host" in problem


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        found = preflight.problems(config(tmp_path, ROUTER__PORT=port, INDEX__PORT=port))
    assert [one for one in found if "router.port" in one]
    assert [one for one in found if one.startswith("index.port")]


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", ":1", "127.0.0.1:99999", "127.0.0.1:1"])
def test_a_ray_that_is_not_there_is_one_sentence(tmp_path: Path, address: str) -> None:
    (problem,) = preflight.problems(config(tmp_path, CLUSTER__RAY_ADDRESS=address))
    assert problem.startswith("cluster.ray_address")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush@host:port",
        "redis://:hush@127.0.0.1:99999",
        "redis://:hush@[::1",
        "redis+sentinel://:hush@a,b",
        "redis+cluster://:hush@a:b",
    ],
)
def test_a_redis_url_that_is_none_is_one_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as failed:
        config(tmp_path, INDEX__URL=url)
    (problem,) = failed.value.problems
    assert problem.startswith("PIE_INDEX__URL: index.url")
    assert "hush" not in problem


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_of_redis_tls_that_is_not_there_is_one_sentence(tmp_path: Path, name: str) -> None:
    url = f"rediss://:hush@host?{name}={tmp_path}/nowhere.pem"
    (problem,) = preflight.problems(config(tmp_path, INDEX__URL=url))
    assert problem.startswith(f"index.url: {name}: {tmp_path}/nowhere.pem cannot be read (No such")


def test_a_folder_for_pages_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    (problem,) = preflight.problems(
        config(tmp_path, POOL__DISK_FOLDERS='["p", "./p"]', POOL__DISK_BUDGET="1MiB")
    )
    assert "twice" in problem


def test_every_problem_is_told_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    said: list[str] = []
    wrong = config(
        tmp_path,
        CLUSTER__LOG_DIR="/dev/null",
        MODEL__CACHE_FOLDER="/dev/null",
        MODEL__SOURCE="/nowhere",
        POLICIES__FILE="/nowhere.yaml",
        MODEL__DEVICE_KV_BUDGET="900TiB",
    )
    with (
        pytest.raises(ConfigError) as caught,
        running(wrong, lambda part, _what: said.append(part)),
    ):
        raise StartError("it started")
    text = "\n".join(caught.value.problems)
    for name in (
        "cluster.log_dir",
        "model.cache_folder",
        "model.source",
        "/nowhere.yaml",
        "device_kv_budget",
    ):
        assert name in text
    assert not said


def bucket(s3_server: LocalS3, **more: object) -> dict[str, object]:
    return {"POOL__OBJECT_BUCKET": "pages", "POOL__OBJECT_ENDPOINT_URL": s3_server.url, **more}


@pytest.mark.live
def test_a_bucket_that_answers_is_well(tmp_path: Path, s3_server: LocalS3) -> None:
    assert not preflight.problems(config(tmp_path, **bucket(s3_server)))


@pytest.mark.live
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"POOL__OBJECT_BUCKET": "nobodys"}, "pool.object_bucket: there is no bucket 'nobodys' at"),
        (
            {"POOL__OBJECT_ENDPOINT_URL": "http://127.0.0.1:9"},
            "pool.object_endpoint_url: no store answers at http://127.0.0.1:9 ",
        ),
        (
            {"POOL__OBJECT_CA_FILE": "/no/such/file.pem"},
            "pool.object_ca_file: there is no file /no/such/file.pem",
        ),
    ],
)
def test_what_is_wrong_with_a_bucket_is_one_sentence(
    tmp_path: Path, s3_server: LocalS3, variables: dict[str, object], sentence: str
) -> None:
    (problem,) = preflight.problems(config(tmp_path, **bucket(s3_server, **variables)))
    assert problem.startswith(sentence)


def test_shelves_that_would_leave_places_no_room_are_one_sentence(tmp_path: Path) -> None:
    full = {"ROUTER__RESPONSES_BYTES": "448MiB", "ROUTER__EXPLAINED_BYTES": "64MiB"}
    assert not preflight.problems(config(tmp_path, **full))
    more = full | {"ROUTER__RESPONSES_BYTES": "1TiB"}
    (problem,) = preflight.problems(config(tmp_path, **more))
    assert problem.startswith(
        "router.responses_bytes and router.explained_bytes are 1048640.0 MiB together"
    )
    (problem,) = preflight.problems(config(tmp_path, INDEX__MEMORY_BUDGET="255MiB"))
    assert problem.endswith("lower them, or raise that to 256.0 MiB")
    own = preflight.problems(config(tmp_path, INDEX__URL="redis://127.0.0.1:1", **more))
    assert not [one for one in own if "responses_bytes" in one]


@pytest.mark.live
def test_credentials_that_do_not_fit_are_one_sentence(
    tmp_path: Path, s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (problem,) = preflight.problems(config(tmp_path, **bucket(s3_server)))
    assert "gives no access to 'pages'" in problem
    assert "AWS_ACCESS_KEY_ID" in problem


def test_what_answers_and_is_no_store_is_one_sentence(tmp_path: Path) -> None:
    class Strange(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Strange) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        (problem,) = preflight.problems(
            config(tmp_path, POOL__OBJECT_BUCKET="pages", POOL__OBJECT_ENDPOINT_URL=url)
        )
        server.shutdown()
    assert problem.startswith(f"pool.object_endpoint_url: {url} is not taken as an S3 store")

import dataclasses

import pytest

from hvdtrain.config import (
    Settings,
    check_common_variables,
    read_settings,
    variable_name,
    written_default,
)
from hvdtrain.config.keras_backend import configured_backend
from hvdtrain.errors import ConfigurationError, MismatchError


def test_defaults():
    assert read_settings({}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("collectives", "mpi", "mpi"),
        ("timeout_s", "2.5", 2.5),
        ("chunk_bytes", "4096", 4096),
        ("chunk_bytes", "auto", None),
        ("bucket_bytes", "0", 0),
        ("bucket_bytes", "auto", None),
        ("non_finite", "ignore", "ignore"),
        ("share_gpus", "yes", True),
        ("share_gpus", "0", False),
        ("log_level", "warning", "warning"),
        ("log_level", "ERROR", "error"),
        ("log_level", "TRACE", "debug"),
        ("log_level", "FATAL", "error"),
        ("soft_placement", "0", False),
        ("log_device_placement", "1", True),
        ("compression", "int8", "int8"),
        ("compression", "powersgd:4", "powersgd:4"),
        ("mode", "sync-ps", "sync-ps"),
        ("mode", "towers", "towers"),
        ("mode", "local-sgd", "local-sgd"),
        ("num_ps", "3", 3),
        ("ps_ranks", "3, 2", (2, 3)),
        ("ps_ranks", "last", ()),
        ("ps_ranks", "", ()),
        ("staleness_bound", "0", 0),
        ("staleness_bound", "none", None),
        ("backup_workers", "2", 2),
        ("update_log", "logs", "logs"),
        ("update_log", "none", None),
    ],
)
def test_a_variable_sets_one_setting(name, text, value):
    settings = read_settings({variable_name(name): text, "HVDTRAIN_UNKNOWN": "x"})
    assert settings == dataclasses.replace(Settings(), **{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("collectives", "gloo"),
        ("timeout_s", "0"),
        ("timeout_s", "nan"),
        ("timeout_s", "soon"),
        ("chunk_bytes", "-1"),
        ("chunk_bytes", "0"),
        ("chunk_bytes", "1.5"),
        ("bucket_bytes", "none"),
        ("non_finite", ""),
        ("share_gpus", "maybe"),
        ("log_level", "loud"),
        ("compression", "gzip"),
        ("mode", "async"),
        ("devices_per_rank", "0"),
        ("devices_per_rank", "all"),
        ("sync_every", "0"),
        ("outer_learning_rate", "0"),
        ("outer_learning_rate", "inf"),
        ("outer_momentum", "1"),
        ("outer_momentum", "-0.1"),
        ("num_ps", "0"),
        ("ps_ranks", "2,"),
        ("ps_ranks", "-1"),
        ("ps_ranks", "2,2"),
        ("staleness_bound", "-1"),
        ("staleness_bound", ""),
        ("backup_workers", "-1"),
        ("backup_workers", "none"),
        ("update_log", ""),
    ],
)
def test_an_invalid_variable_is_an_error(name, text):
    variable = variable_name(name)
    with pytest.raises(ConfigurationError, match=f"{variable}='{text}'.*Unset it"):
        read_settings({variable: text})


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"mode": "allreduce"}, "allreduce"),
        ({"mode": "sync-ps"}, "sync-ps"),
        ({"mode": "async-ps", "staleness_bound": "0"}, "async-ps with --staleness-bound 0"),
    ],
)
def test_overlap_is_an_error_in_modes_that_wait_for_updates(settings, mode):
    environ = {variable_name(name): text for name, text in settings.items()}
    assert not read_settings(environ | {"HVDTRAIN_OVERLAP": "0"}).overlap
    match = f"--overlap .HVDTRAIN_OVERLAP. is not possible in mode {mode},"
    with pytest.raises(ConfigurationError, match=match):
        read_settings(environ | {"HVDTRAIN_OVERLAP": "1"})


@pytest.mark.parametrize("bound", ["none", "1", "3"])
def test_overlap_in_asynchronous_training(bound):
    environ = {"HVDTRAIN_MODE": "async-ps", "HVDTRAIN_STALENESS_BOUND": bound}
    assert read_settings(environ | {"HVDTRAIN_OVERLAP": "1"}).overlap
    assert not read_settings(environ).overlap


@pytest.mark.parametrize("entry", dataclasses.fields(Settings), ids=lambda entry: entry.name)
def test_each_setting_has_a_help_text_and_can_parse_its_default(entry):
    assert entry.metadata["parse"](written_default(entry)) == entry.default
    assert len(entry.metadata["help"]) > 20


@pytest.mark.parametrize(
    ("mode", "has_servers"),
    [("allreduce", False), ("towers", False), ("async-ps", True), ("sync-ps", True)],
)
def test_modes_with_parameter_servers(mode, has_servers):
    assert Settings(mode=mode).has_servers == has_servers


_MODE_SETTINGS = {
    "devices_per_rank": ("4", "towers"),
    "sync_every": ("50", "local-sgd"),
    "outer_learning_rate": ("0.7", "local-sgd"),
    "outer_momentum": ("0.9", "local-sgd"),
}


@pytest.mark.parametrize("other_mode", ["allreduce", "async-ps"])
@pytest.mark.parametrize("name", _MODE_SETTINGS)
def test_a_setting_of_another_mode_is_an_error(name, other_mode):
    text, mode = _MODE_SETTINGS[name]
    variables = {variable_name(name): text, "HVDTRAIN_MODE": mode}
    assert getattr(read_settings(variables), name) == float(text)
    option = f"--{name.replace('_', '-')} {text} .{variable_name(name)}."
    match = f"{option} needs --mode {mode}, but the mode is {other_mode}. Pass --mode {mode}"
    with pytest.raises(ConfigurationError, match=match):
        read_settings({**variables, "HVDTRAIN_MODE": other_mode})


def test_towers():
    assert Settings(mode="towers", devices_per_rank=4).towers == 4
    assert Settings(mode="towers").towers == Settings().towers == 1


def test_local_sgd():
    settings = Settings(mode="local-sgd", sync_every=50)
    assert (settings.is_local_sgd, settings.has_servers) == (True, False)
    # With one step per round, averaging weights is averaging gradients.
    assert settings.gradients_in_update(3) == 3
    assert not Settings().is_local_sgd


@pytest.mark.parametrize("mode", ["local-sgd", "async-ps"])
@pytest.mark.parametrize("form", ["int8", "powersgd:4"])
def test_compression_needs_averaged_gradients(mode, form):
    with pytest.raises(ConfigurationError, match=rf"--compression {form} .* the mode is {mode}"):
        read_settings({"HVDTRAIN_MODE": mode, "HVDTRAIN_COMPRESSION": form})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"powersgd{rank}", "powersgd:RANK with a whole number") for rank in ("", ":0", ":x")),
        ("fp16:2", "one of none, fp16, bf16, int8, powersgd:RANK"),
    ],
)
def test_invalid_compression(text, expected):
    with pytest.raises(ConfigurationError, match=f"COMPRESSION='{text}' .*: expected {expected}"):
        read_settings({"HVDTRAIN_COMPRESSION": text})


def test_different_settings_of_ranks_are_an_error():
    default, other = Settings(mode="local-sgd").common_variables, Settings().common_variables
    every_50 = Settings(mode="local-sgd", sync_every=50).common_variables
    check_common_variables([every_50, every_50])
    match = r"SYNC_EVERY .* got 50 on rank 0 and 1 on rank 2.*mpirun -x HVDTRAIN_SYNC_EVERY"
    with pytest.raises(MismatchError, match=match):
        check_common_variables([every_50, every_50, default])
    with pytest.raises(MismatchError, match=r"HVDTRAIN_MODE .* got allreduce on rank 0 and local"):
        check_common_variables([other, every_50])


def test_the_backend_is_the_one_that_keras_chooses(tmp_path):
    home = {"KERAS_HOME": str(tmp_path)}
    assert configured_backend(home) == "tensorflow"
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert configured_backend(home) == "jax"
    assert configured_backend({**home, "KERAS_BACKEND": "torch"}) == "torch"
    (tmp_path / "keras.json").write_text("not JSON")
    assert configured_backend(home) == "tensorflow"
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "torch"}')
    assert configured_backend({"HOME": str(tmp_path)}) == "torch"

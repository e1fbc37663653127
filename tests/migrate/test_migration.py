"""What becomes of scripts that use Horovod, and what their readers are told."""

from __future__ import annotations

import ast
import shutil

import pytest

from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate.migration import Migration, migrate
from tests.harness.required import do_without
from tests.migrate.scripts import SCRIPTS, Script

each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


def told(migration: Migration) -> dict[int, str]:
    """All that is left to do by hand, by line."""
    lines: dict[int, str] = {}
    for finding in migration.findings:
        if not finding.note:
            lines[finding.line] = f"{lines.get(finding.line, '')}{finding.text}\n"
    return lines


def moved(text: str) -> str:
    return migrate(text.encode()).new.decode()


@each_script
def test_certain_lines_change(script: Script) -> None:
    old = script.text.encode().split(b"\n")
    migration = migrate(script.text.encode())
    new = migration.new.split(b"\n")
    assert len(new) == len(old)
    changed = [number for number, (a, b) in enumerate(zip(old, new), 1) if a != b]
    assert changed == list(script.changed)
    assert migration.changed_lines == len(changed)


@each_script
def test_the_rest_is_told(script: Script) -> None:
    migration = migrate(script.text.encode())
    lines = told(migration)
    expected = script.left or {}
    assert sorted(lines) == sorted(expected), lines
    for line, words in expected.items():
        assert words in lines[line]
    assert [each.line for each in migration.findings if each.note] == list(script.notes)


@each_script
def test_only_names_change(script: Script) -> None:
    old, new = ast.parse(script.text), ast.parse(moved(script.text))
    assert ast.dump(new).replace("hvdtrain", "horovod") == ast.dump(old)
    assert _constants(new) == _constants(old)


def _constants(tree: ast.Module) -> list[object]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


@each_script
def test_twice_is_once(script: Script) -> None:
    once = migrate(script.text.encode())
    twice = migrate(once.new)
    assert twice.new == once.new


@each_script
@pytest.mark.parametrize("end", ["\r\n", "\r"], ids=["crlf", "cr"])
def test_ends_of_lines_stay(script: Script, end: str) -> None:
    other = script.text.replace("\n", end).encode()
    migration = migrate(other)
    assert migration.new == moved(script.text).replace("\n", end).encode()
    assert told(migration) == told(migrate(script.text.encode()))


@each_script
def test_the_diff_makes_the_new_script(script: Script, tmp_path, run_command) -> None:
    if shutil.which("patch") is None:
        do_without("patch", "the program patch isn't installed")
    for text in (script.text, script.text.rstrip("\n"), script.text.replace("\n", "\r\n")):
        path = tmp_path / "train.py"
        path.write_bytes(text.encode())
        migration = migrate(text.encode())
        (tmp_path / "diff").write_bytes(migration.diff(b"train.py"))
        done = run_command(["patch", "--binary", str(path), str(tmp_path / "diff")])
        assert done.returncode == 0, done
        assert path.read_bytes() == migration.new


BYTES = {
    "bom": b"\xef\xbb\xbfimport horovod.keras as hvd\n",
    "cookie": "# coding: latin-1\nname = 'é'; import horovod.keras as hvd\n".encode("latin-1"),
    "utf-8": "name = 'é漢😀'; import horovod.keras as hvd # é\n".encode(),
    "form-feed": b"'a\x0cb'\n\x0cimport horovod.keras as hvd\n",
    "other-line-ends": "x = '\u2028\x85'\nimport horovod.keras as hvd\n".encode(),
    "no-end": b"import horovod.keras as hvd",
    "tabs": b"if x:\n\timport horovod.keras as hvd\t \n",
    "text": b'"""\nimport horovod.keras as hvd\n"""\nimport horovod.keras as hvd\n',
}


@pytest.mark.parametrize("raw", BYTES.values(), ids=BYTES)
def test_the_other_bytes_stay(raw: bytes) -> None:
    before, _, after = raw.rpartition(b"horovod")
    migration = migrate(raw)
    assert migration.new == before + b"hvdtrain" + after
    assert migration.changed_lines == 1
    assert migration.findings == ()


KEPT = {
    "comment": "# import horovod.keras as hvd\n",
    "string": "logging.getLogger('horovod.keras')\n",
    "own-package": "from .horovod import tensorflow\nfrom horovodx import keras\n",
    "own-name": "horovod = 3\nprint(horovod)\n",
    "attribute": "self.horovod.tensorflow.init()\n",
    "nothing": "",
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_is_no_import_of_horovod_stays(text: str) -> None:
    migration = migrate(text.encode())
    assert migration.new == text.encode()
    assert migration.findings == ()
    assert migration.diff(b"train.py") == b""


def test_a_name_of_two_meanings_is_not_moved() -> None:
    text = "import horovod.keras\nhorovod = wrap(horovod)\nhorovod.keras.init()\n"
    assert moved(text) == text
    assert "write hvdtrain for horovod by hand" in told(migrate(text.encode()))[1]


def test_the_whole_package_moves_with_all_its_uses() -> None:
    text = "import horovod\nimport horovod.keras\nhorovod.keras.init()\n"
    assert moved(text) == text.replace("horovod", "hvdtrain")
    text = "import horovod as h\nimport horovod.keras as hvd\nh.keras.init()\n"
    assert moved(text) == text.replace("horovod", "hvdtrain")
    text = "import horovod as h\nh.keras.init()\nprint(h.__version__)\n"
    assert moved(text) == text
    assert sorted(told(migrate(text.encode()))) == [1, 3]


def test_a_package_that_may_be_missing_is_known_all_the_same() -> None:
    text = "try:\n    import {} as hvd\nexcept ImportError:\n    hvd = None\n{}\n"
    text = text.format("horovod.tensorflow", "hvd.refs_to_vars([])")
    assert moved(text) == text.replace("horovod", "hvdtrain")
    assert sorted(told(migrate(text.encode()))) == [5]
    # The name of the package would have to be another in both places.
    text = "try:\n    import horovod.keras\nexcept ImportError:\n    horovod = None\n"
    assert moved(text) == text
    assert sorted(told(migrate(text.encode()))) == [2]


def test_names_of_two_imports_are_wrong_only_if_both_are() -> None:
    text = "try:\n    from keras import backend as K\nexcept ImportError:\n    {}\nK.get_value(x)\n"
    both = text.format("from tensorflow.keras import backend as K")
    assert told(migrate(both.encode())) == {}
    assert 5 in told(migrate(text.format("pass").encode()))


def test_a_variable_that_is_an_optimizer_now_and_then_is_none() -> None:
    text = "import keras\nopt = keras.optimizers.SGD(0.1)\n{}\nopt.variables()\n"
    assert 4 in told(migrate(text.format("pass").encode()))
    assert told(migrate(text.format("opt = Mine()").encode())) == {}


def test_what_is_told_of_an_import_is_not_told_again() -> None:
    for text in (
        "import horovod.torch as hvd\nhvd.init()\n",
        "from horovod.torch import init\ninit()\n",
        "from tensorflow import layers\nlayers.dense(x)\n",
    ):
        assert [each.line for each in migrate(text.encode()).findings] == [1]


@pytest.mark.parametrize("binding", ["def f(tf): ...", "tf = 0", "for tf in x: ..."])
def test_a_name_that_is_bound_again_is_no_module(binding: str) -> None:
    text = f"import tensorflow as tf\n{binding}\ntf.Session()\n"
    assert told(migrate(text.encode())) == {}


OPTIMIZERS = {
    "keras.optimizers.SGD(lr=0.1)": "lr is gone since Keras 3; write learning_rate",
    "keras.optimizers.SGD(0.1, decay=1e-6)": "decay has no effect since Keras 3; give",
    "tf.optimizers.SGD(lr=0.1)": "lr is gone since Keras 3; write learning_rate",
    "mine.SGD(lr=0.1, decay=0.1)": None,
    "keras.optimizers.get(lr=0.1)": None,
    "model.optimizer.lr": "model.optimizer.lr is gone since Keras 3; write model.optimizer.learn",
    "model.optimizer.weights": "is gone since Keras 3; write model.optimizer.variables",
    "model.optimizer.variables()": "model.optimizer.variables is a property since Keras 3",
    "model.optimizer.variables": None,
    "model.variables()": None,
    "args.lr": None,
}


@pytest.mark.parametrize(("code", "words"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_of_optimizers_is_told(code: str, words: str | None) -> None:
    lines = told(migrate(f"import keras\nimport tensorflow as tf\n{code}\n".encode()))
    assert sorted(lines) == ([3] if words else [])
    assert (words or "") in lines.get(3, "")


def test_sums_may_be_long() -> None:
    terms = " + ".join(["horovod.keras.rank()"] * 800)
    text = f"import horovod.keras\nprint({terms})\n"
    assert moved(text) == text.replace("horovod", "hvdtrain")


def test_what_the_compiler_would_warn_of_is_left_to_it(recwarn) -> None:
    assert moved("x = '\\d'\n") == "x = '\\d'\n"
    assert not recwarn.list


def test_legacy_optimizers_are_told_with_their_successors() -> None:
    text = "from tensorflow import keras\nkeras.optimizers.legacy.Adam(0.1)\n"
    assert (
        "can't be made since Keras 3; use keras.optimizers.Adam" in told(migrate(text.encode()))[2]
    )


def test_calls_are_of_keras_only_in_scripts_that_import_it() -> None:
    text = "import {}\nmodel.fit(x, workers=4)\n"
    assert told(migrate(text.format("sklearn").encode())) == {}
    assert 2 in told(migrate(text.format("horovod.keras as hvd").encode()))


FILES = {
    "save_weights('a.weights.h5')": None,
    "save_weights(name)": None,
    "save_weights('a')": ".weights.h5",
    "save_weights(filepath='a.h5')": ".weights.h5",
    "ModelCheckpoint('a.keras')": None,
    "ModelCheckpoint('a.h5')": None,
    "ModelCheckpoint('a-{epoch}.hdf5')": ".keras",
    "ModelCheckpoint('a.h5', save_weights_only=True)": ".weights.h5",
    "ModelCheckpoint('a.weights.h5', save_weights_only=True)": None,
    "ModelCheckpoint('a.h5', save_weights_only=maybe)": None,
}


@pytest.mark.parametrize(("call", "end"), FILES.items(), ids=FILES)
def test_files_that_keras_refuses_are_told(call: str, end: str | None) -> None:
    texts = told(migrate(f"import keras\nx.{call}\n".encode()))
    assert [text.rpartition(" ")[2] for text in texts.values()] == ([f"{end}\n"] if end else [])


UNUSABLE = {
    "python-2": (b"x = 1\nprint 'x'\n", "line 2 isn't Python 3: "),
    "bad-utf-8": (b"x = '\xe9'\n", "it can't be decoded: "),
    "unknown-cookie": (b"# coding: no-such\n", "it can't be decoded: unknown encoding"),
    "no-way-back": (b"# coding: iso2022_jp\n# \x1b(B\n", "can't be written back unchanged"),
    "deep-minus": (b"-" * 100_000 + b"1", "it isn't Python 3: "),
    "null": (b"x = 1\x00\n", "null"),
    "deep": (b"(" * 5000 + b")" * 5000, "isn't Python 3: "),
}


@pytest.mark.parametrize(("raw", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_no_python_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        migrate(raw)
    assert words in str(caught.value)

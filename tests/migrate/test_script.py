from __future__ import annotations

import ast
import shutil

import pytest

from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate.script import Migration, migrate
from tests.harness.required import skip_or_fail

# A script, its changed lines, and parts of the findings for each line.
SCRIPTS: dict[str, tuple[str, list[int], dict[int, str]]] = {
    "loop": (
        """\
import tensorflow as tf

import horovod
import horovod.tensorflow as hvd


def train():
    # Horovod: initialize Horovod.
    hvd.init()
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    hvd.broadcast_variables(opt.variables(), root_rank=0)


horovod.run(train, np=4)
""",
        [3, 4],
        {
            11: "opt.variables is a property since Keras 3; remove the parentheses",
            14: "horovod.run is not offered by hvdtrain; start the script with hvdtrain run",
        },
    ),
    "keras": (
        """\
import keras
from keras import backend as K
import tensorflow as tf
import horovod.keras as hvd
from horovod.keras import callbacks
K.set_session(tf.Session(config=tf.ConfigProto()))
opt = keras.optimizers.Adadelta(lr=1.0 * hvd.size(),
                                decay=1e-6)
model.compile(optimizer=hvd.DistributedOptimizer(opt), experimental_run_tf_function=False)
model.fit_generator(data, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
tf.compat.v1.logging.info(f'{args.lr} {tf.keras.layers.Dense(1)} {sorted(x, decay=1)}')
""",
        [4, 5],
        {
            6: "tf.ConfigProto was removed in TensorFlow 2; remove it: hvdtrain.init() binds",
            7: "lr was removed in Keras 3; write learning_rate",
            8: "decay was removed in Keras 3; pass a schedule as learning_rate",
            9: "experimental_run_tf_function was removed in Keras 3; remove it",
            10: "fit_generator was removed in Keras 3; use fit",
        },
    ),
    "dotted": (
        """\
import horovod.tensorflow, horovod.mxnet as mx_hvd, horovod.torch
import horovod.tensorflow.elastic

horovod.tensorflow.init()  # as horovod.tensorflow says
state = horovod.tensorflow.elastic.TensorFlowState(['horovod.tensorflow'])
print(f'{horovod.tensorflow.rank()} of {horovod.__version__}')
horovod.mxnet.init()
mx_hvd.init()
horovod.torch.init()
""",
        [1, 2, 4, 5, 6, 9],
        {1: "horovod.mxnet is not offered by hvdtrain; hvdtrain supports", 7: "horovod.mxnet"},
    ),
    "from": (
        """\
from horovod import tensorflow as hvd
from horovod.tensorflow import (
    allreduce as mean,
    refs_to_vars)
from horovod \\
    .keras import callbacks
from horovod import keras, spark
from horovod.mxnet import init
try:
    from   horovod.tensorflow\timport keras as hvd_keras; import horovod.keras as old
except ImportError:
    hvd_keras = None
init()
from .horovod import tensorflow
""",
        [1, 2, 5, 7, 10],
        {
            2: "horovod.tensorflow.refs_to_vars is not offered by hvdtrain; it is internal",
            7: "horovod.spark is not offered by hvdtrain; start the script with hvdtrain run",
            8: "horovod.mxnet.init is not offered by hvdtrain",
        },
    ),
    "formatted": (
        r'''
import horovod.keras

a = f"horovod.keras.rank() {horovod.keras.rank()} {{horovod.keras.rank()}}"
b = f'é {f"{horovod.keras.rank()}"} {"horovod" + horovod.keras.rank()}' "h" rf"\{horovod.keras}"
d = f"""
 é{
  horovod.keras.rank()} horovod {horovod.keras.rank()
  + horovod.keras.rank()}""" f"\
  {horovod.keras.rank()}"
''',
        [2, 4, 5, 8, 9, 10],
        {},
    ),
    "alternatives": (
        """\
try:
    import horovod, horovod.keras
    from keras import backend as K
except ImportError:
    horovod = None
    from mine import backend as K
import horovod as h
K.set_session(horovod.keras.init())
""",
        [2, 5, 7, 8],
        {},
    ),
    "strings": (
        """\
'''Replaces
import horovod.keras as hvd
'''
import importlib
from importlib import import_module as load
hvd = importlib.import_module("horovod.tensorflow.keras")
package = __import__('horovod')
other = load("horovod.mxnet")
other = load(f"horovod.{package}")
print("horovod is here", "horovod.keras is")
exec("if True:\\n    import horovod.keras as hvd")
""",
        [],
        {
            6: "if it names a module, change it to 'hvdtrain.tensorflow.keras'",
            7: "'horovod' is a string; if it names a module, change it to 'hvdtrain'",
            8: "'horovod.mxnet' is not offered by hvdtrain; hvdtrain supports TensorFlow, Keras",
            9: "'horovod.' is a string; if it names a module, change it to 'hvdtrain.'",
            11: "a string imports horovod; change it to hvdtrain",
        },
    ),
    "other": (
        "# import horovod\nlog.getLogger('horovod.keras')\nhorovod = 3\nx.horovod.y\n",
        [],
        {},
    ),
}
each_script = pytest.mark.parametrize("name", SCRIPTS)


def texts(migration: Migration) -> dict[int, str]:
    """Return the findings by line."""
    lines: dict[int, str] = {}
    for line, text in migration.findings:
        lines[line] = lines.get(line, "") + text + "\n"
    return lines


@each_script
def test_migrate(name: str) -> None:
    text, changed, expected = SCRIPTS[name]
    migration = migrate(text.encode())
    old, new = text.split("\n"), migration.new.decode().split("\n")
    assert [number for number, (a, b) in enumerate(zip(old, new), 1) if a != b] == changed
    assert migration.changed_lines == len(changed)
    lines = texts(migration)
    assert lines.keys() == expected.keys(), lines
    for line, part in expected.items():
        assert part in lines[line]
    # Only names change, not constants.
    before, after = ast.parse(text), ast.parse(migration.new)
    assert ast.dump(after).replace("hvdtrain", "horovod") == ast.dump(before)
    assert ast.dump(after).count("Constant(value='hvdtrain") == 0
    assert migrate(migration.new).new == migration.new


@pytest.mark.parametrize("end", ["\r\n", "\r"], ids=["crlf", "cr"])
def test_line_ends_are_kept(end: str) -> None:
    text = SCRIPTS["from"][0] + SCRIPTS["formatted"][0]
    migration, other = migrate(text.encode()), migrate(text.replace("\n", end).encode())
    assert other.new == migration.new.replace(b"\n", end.encode())
    assert other.findings == migration.findings


@pytest.mark.parametrize("change", [("", ""), ("\n", "\r\n"), ("callbacks\n", "callbacks")])
def test_patch_applies_the_diff(change: tuple[str, str], tmp_path, run_command) -> None:
    if shutil.which("patch") is None:
        skip_or_fail("patch", "the program patch isn't installed")
    text = "import horovod.keras as hvd\nfrom horovod.keras import callbacks\n".replace(*change)
    (tmp_path / "train.py").write_bytes(text.encode())
    migration = migrate(text.encode())
    (tmp_path / "diff").write_bytes(migration.diff(b"train.py"))
    done = run_command(["patch", "--binary", str(tmp_path / "train.py"), str(tmp_path / "diff")])
    assert done.returncode == 0, done
    assert (tmp_path / "train.py").read_bytes() == migration.new


BYTES = {
    "bom": b"\xef\xbb\xbfimport horovod.keras as hvd\n",
    "cookie": "# coding: latin-1\nname = 'é'\nimport horovod.keras as hvd\n".encode("latin-1"),
    "utf-8": "name = 'é漢😀'; import horovod.keras as hvd # é\n".encode(),
    "form-feed": b"'a\x0cb'\n\x0cimport horovod.keras as hvd\n",
    "other-line-ends": "x = '\u2028\x85'\nimport horovod.keras as hvd\n".encode(),
    "no-end": b"if x:\n\timport horovod.keras as hvd",
    "invalid-escape": b"x = '\\d'; import horovod.keras as hvd",
}


@pytest.mark.parametrize("raw", BYTES.values(), ids=BYTES)
def test_other_bytes_are_kept(raw: bytes, recwarn) -> None:
    migration = migrate(raw)
    assert migration.new == raw.replace(b"horovod", b"hvdtrain")
    assert migration.findings == ()
    assert not recwarn.list


def test_columns_in_other_encodings_are_left_to_the_user() -> None:
    raw = "# coding: latin-1\nname = 'é'; import horovod.keras as hvd\n".encode("latin-1")
    migration = migrate(raw)
    assert migration.new == raw
    assert texts(migration) == {
        2: "horovod could not be located in this line; change it to hvdtrain\n"
    }


def test_long_expressions() -> None:
    terms = " + ".join(["horovod.keras.rank()"] * 800)
    text = f"import horovod.keras\nprint({terms})\n".encode()
    assert migrate(text).new == text.replace(b"horovod", b"hvdtrain")


UNUSABLE = {
    "python-2": (b"x = 1\nprint 'x'\n", r"is not valid Python 3: .*line 2"),
    "bad-utf-8": (b"x = '\xe9'\n", "is not valid Python 3: .*can't decode byte"),
    "unknown-cookie": (b"# coding: no-such\n", "is not valid Python 3: unknown encoding"),
    "null": (b"x = 1\x00\n", "null"),
    "deep": (b"(" * 5000 + b")" * 5000, "is not valid Python 3: "),
}


@pytest.mark.parametrize(("raw", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_scripts_are_an_error(raw: bytes, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        migrate(raw)

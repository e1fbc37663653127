"""Scripts as Horovod's users write them, with what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCRIPTS", "Script"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, the numbers of the lines that change, and what is told, without the line."""

    text: str
    changed: tuple[int, ...] = ()
    left: dict[int, str] | None = None
    notes: tuple[int, ...] = ()


_LOOP = """\
import sys

import tensorflow as tf

import horovod
import horovod.tensorflow as hvd


def train():
    # Horovod: initialize Horovod.
    hvd.init()

    gpus = tf.config.experimental.list_physical_devices('GPU')
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

    (images, labels), _ = tf.keras.datasets.mnist.load_data(path='mnist-%d.npz' % hvd.rank())
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32),
                 tf.cast(labels, tf.int64))
    )
    dataset = dataset.repeat().shuffle(10000).batch(128)
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss_value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables(), root_rank=0)
        return loss_value

    for batch, (images, labels) in enumerate(dataset.take(10000 // hvd.size())):
        training_step(images, labels, batch == 0)
    if hvd.rank() == 0:
        checkpoint.save('./checkpoints')


if __name__ == '__main__':
    if len(sys.argv) == 4:
        print('Running training through horovod.run')
        horovod.run(train, np=int(sys.argv[1]), hosts=sys.argv[2], use_mpi=True)
    else:
        train()
"""

_FIT = """\
import tensorflow as tf
import horovod.tensorflow.keras as hvd
from horovod.tensorflow.keras import callbacks as hvd_callbacks

hvd.init()

model = tf.keras.Sequential([tf.keras.layers.Dense(10, activation='softmax')])
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(
    opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(loss=tf.losses.SparseCategoricalCrossentropy(),
              optimizer=opt,
              metrics=['accuracy'],
              experimental_run_tf_function=False)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd_callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint('./checkpoint-{epoch}.h5'))
verbose = 1 if hvd.rank() == 0 else 0
model.fit(dataset, steps_per_epoch=500 // hvd.size(), callbacks=callbacks, epochs=24,
          verbose=verbose)
"""

_BENCHMARK = """\
import os
import timeit

import tensorflow as tf
import horovod.tensorflow as hvd
from tensorflow.keras import applications

hvd.init()
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
model = applications.ResNet50(weights=None)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([32, 224, 224, 3])


@tf.function
def benchmark_step():
    compression = hvd.Compression.fp16
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(data, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables),
                            model.trainable_variables))


with tf.device('CPU'):
    seconds = timeit.timeit(benchmark_step, number=10)
print('%.1f images a second' % (320 / seconds * hvd.size()))
"""

_OLD_KERAS = """\
import keras
from keras import backend as K
from keras.preprocessing.image import ImageDataGenerator
import tensorflow as tf
import horovod.keras as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

model = keras.models.Sequential([keras.layers.Dense(10)])
opt = keras.optimizers.Adadelta(lr=1.0 * hvd.size(), decay=1e-6)
opt = hvd.DistributedOptimizer(opt)
model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt)
if K.image_data_format() == 'channels_last':
    K.set_value(model.optimizer.lr, 0.5)
model.fit_generator(ImageDataGenerator().flow(x, y), callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0)], workers=4)
model.save_weights('weights.h5')
model.save_weights('last.weights.h5')
"""

_GRAPH = """\
import tensorflow as tf
import tensorflow.compat.v1 as tf1
import horovod.tensorflow as hvd

layers = tf.layers
hvd.init()
image = tf.placeholder(tf.float32, [None, 784])
loss = tf.losses.softmax_cross_entropy(label, layers.dense(image, 10))
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.001 * hvd.size()))
old = tf1.train.GradientDescentOptimizer(0.1)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=100)]
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    session.run(opt.minimize(loss))
tf1.logging.info('done')
"""

_DOTTED = """\
import horovod.tensorflow, horovod.torch as torch_hvd
import horovod.tensorflow.elastic

horovod.tensorflow.init()  # as horovod.tensorflow says
state = horovod.tensorflow.elastic.TensorFlowState(['horovod.tensorflow'])
print(f'{horovod.tensorflow.rank()} of {horovod.tensorflow.size()}')
horovod.torch.init()
"""

_FROM = """\
from horovod import tensorflow as hvd
from horovod.tensorflow import (
    allreduce as mean,
    refs_to_vars)
from horovod \\
    .keras import callbacks
from horovod import keras, spark
try:
    from   horovod.tensorflow\timport keras as hvd_keras; import horovod.keras as old
except ImportError:
    hvd_keras = None
"""

# Where in such strings names stand, Python tells as of other names.
_FORMATTED = r'''
import horovod.keras

a = f"horovod.keras.rank() {horovod.keras.rank()} {{horovod.keras.rank()}}"
b = f'é {f"{horovod.keras.rank()}"} {"horovod" + horovod.keras.rank()}' "h" rf"\{horovod.keras}"
c = (f"{a}"
     f"\N{DIGIT ONE} é {{{horovod.keras.size}}}\t{horovod.keras.size!r:>{horovod.keras.size()}}")
d = f"""
 é{
  horovod.keras.rank()} horovod {horovod.keras.rank()
  + horovod.keras.rank()}""" f"\
  {horovod.keras.rank()}"
'''

_DYNAMIC = """\
\'\'\'Takes the place of
import horovod.keras as hvd
\'\'\'
import importlib
from importlib import import_module as load

hvd = importlib.import_module("horovod.tensorflow.keras")
package = __import__('horovod')
torch = load("horovod.torch")
NAME = "horovod.keras"
other = load(f"horovod.{package}")
print("horovod is here", "horovod.keras is")
exec("if True:\\n    import horovod.keras as hvd")
"""

_RUN = "not offered by hvdtrain; start the script with hvdtrain run"

SCRIPTS: dict[str, Script] = {
    "dynamic": Script(
        text=_DYNAMIC,
        left={
            7: "where it names a module write 'hvdtrain.tensorflow.keras' by hand",
            8: "'horovod' is a string and stays; where it names a module write 'hvdtrain' by hand",
            9: "horovod.torch is not offered by hvdtrain; hvdtrain trains Keras models on",
            10: "write 'hvdtrain.keras' by hand",
            11: "'horovod.' is a string and stays; where it names a module write 'hvdtrain.' by",
            13: "a string imports horovod; write hvdtrain in it by hand",
        },
    ),
    "loop": Script(
        text=_LOOP,
        changed=(6,),
        left={
            5: "import horovod stays because of horovod.run in line 51; remove both",
            39: "opt.variables is a property since Keras 3",
            51: f"horovod.run is {_RUN}",
        },
        notes=(17,),
    ),
    "fit": Script(
        text=_FIT,
        changed=(2, 3),
        left={18: "experimental_run_tf_function is gone since Keras 3; drop it"},
    ),
    "benchmark": Script(text=_BENCHMARK, changed=(5,)),
    "old-keras": Script(
        text=_OLD_KERAS,
        changed=(5,),
        left={
            3: "ImageDataGenerator is gone since Keras 3; tf.keras.preprocessing.image.ImageData",
            8: "tf.ConfigProto is gone since TensorFlow 2; drop it: hvdtrain.init() binds",
            11: "K.set_session is gone since Keras 3; drop it",
            14: "lr is gone since Keras 3; write learning_rate",
            18: "K.set_value is gone since Keras 3; tf.keras.backend.set_value still does it",
            19: "model.fit_generator is gone since Keras 3; use fit",
            20: "workers is gone from fit_generator since Keras 3",
            21: "save_weights refuses 'weights.h5' since Keras 3; let the name end",
        },
    ),
    "graph": Script(
        text=_GRAPH,
        changed=(3,),
        left={
            5: "tf.layers is gone since TensorFlow 2; use the layers in keras.layers",
            7: "tf.placeholder is gone since TensorFlow 2",
            8: "use keras.losses.CategoricalCrossentropy(from_logits=True)",
            9: "tf.train.AdamOptimizer is gone since TensorFlow 2; use keras.optimizers.Adam",
            11: "tf.train.StopAtStepHook is gone since TensorFlow 2",
            12: "tf.train.MonitoredTrainingSession is gone since TensorFlow 2",
        },
    ),
    "dotted": Script(
        text=_DOTTED,
        changed=(1, 2, 4, 5, 6),
        left={
            1: "horovod.torch is not offered by hvdtrain; hvdtrain trains Keras",
            7: "horovod.to",
        },
    ),
    "formatted": Script(text=_FORMATTED, changed=(2, 4, 5, 7, 10, 11, 12)),
    "from": Script(
        text=_FROM,
        changed=(1, 2, 5, 9),
        left={
            4: "horovod.tensorflow.refs_to_vars is not offered by hvdtrain; it is a part",
            7: "give what hvdtrain offers an import of its own, from hvdtrain",
        },
    ),
}

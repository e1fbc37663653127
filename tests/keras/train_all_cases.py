"""A program: each case trains like one process, with whatever combines gradients in this job."""

import numpy as np

import hvdtrain
from tests.keras.equivalence import CASES, alike, distance, train_both

hvdtrain.init()
for case in CASES:
    together, reference, joint, alone = train_both(hvdtrain, "adamw", case)
    assert distance(together, reference) <= 1e-5, case
    assert alike(together), case
    assert joint.keys() == alone.keys()
    np.testing.assert_allclose(joint["loss"], alone["loss"], rtol=1e-5, err_msg=case)
# Unbuffered, as horovodrun has it, several words are several writes, which mpirun tags.
print(f"trained {len(CASES)}\n", end="", flush=True)

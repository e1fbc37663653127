"""Trains cases for a comparison with one process: train_all_cases.py CASE ..."""

import sys

import numpy as np

import hvdtrain
from tests.trainer.equivalence import alike, distance, train_both

hvdtrain.init()
for case in sys.argv[1:]:
    together, reference, joint, alone = train_both(hvdtrain, "adamw", case)
    assert distance(together, reference) <= 1e-5, case
    assert alike(together), case
    assert joint.keys() == alone.keys()
    np.testing.assert_allclose(joint["loss"], alone["loss"], rtol=1e-5, err_msg=case)
# Print the line in one write, because mpirun tags each write if the output is unbuffered, as under
# horovodrun.
print(f"trained {len(sys.argv) - 1}\n", end="", flush=True)

import numpy as np
import pytest

from app.learning.blocks import Permutation, Place


def test_an_epochs_blocks_are_every_sample_once():
    permutation = Permutation(seed=3, n_samples=10, block_samples=4)
    assert permutation.blocks == 3
    blocks = [permutation.indices(0, block) for block in range(3)]
    assert [len(b) for b in blocks] == [4, 4, 2]
    assert sorted(np.concatenate(blocks).tolist()) == list(range(10))
    with pytest.raises(IndexError):
        permutation.indices(0, 3)


def test_a_permutation_is_a_function_of_seed_and_epoch_alone():
    def whole(seed, epoch):
        return Permutation(seed, 1000, 1000).indices(epoch, 0).tolist()

    jumping = Permutation(1, 1000, 10)
    assert [jumping.indices(epoch, 7).tolist() for epoch in (2, 0, 2)] == [
        whole(1, epoch)[70:80] for epoch in (2, 0, 2)
    ]
    assert whole(1, 0) != whole(1, 1)
    assert whole(1, 0) != whole(2, 0)


def test_blocks_are_counted_over_all_epochs():
    permutation = Permutation(0, 10, 4)
    wanted = [Place(0, 0, 0, 4), Place(0, 1, 0, 4), Place(0, 2, 0, 2), Place(1, 0, 0, 4)]
    assert [permutation.place(number) for number in range(4)] == wanted


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError):
        Permutation(0, 0, 4)
    with pytest.raises(ValueError):
        Permutation(0, 4, 0)

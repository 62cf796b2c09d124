import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.bandit.dense import DensePlanner, dense_laplace, dense_matrix, dense_theta
from worker.bandit.planning import Planner
from worker.bandit.policies import Ucbbp
from worker.bench.core import Scene, Size

sizes = st.builds(Size, dim=st.integers(1, 6), arms=st.integers(1, 12), horizon=st.integers(1, 6))


@given(size=sizes)
@settings(max_examples=30)
def test_the_kernel_and_the_plain_loop_plan_the_same_slates(size):
    scene = Scene.of(size, sessions=50)
    contexts = scene.contexts()[:10]
    plain = DensePlanner(scene.belief, scene.world.rewards, horizon=size.horizon, beta=1.5)
    planner = Planner(scene.belief, scene.world.rewards, horizon=size.horizon, dtype=np.float64)
    assert Ucbbp(beta=1.5).slates(planner, contexts).arms.tolist() == [plain.slate(x).tolist() for x in contexts]


@given(size=sizes)
@settings(max_examples=30)
def test_the_structured_fold_is_the_dense_fold(size):
    scene = Scene.of(size, sessions=50)
    data = scene.episode(40)
    theta, matrix = dense_laplace(dense_theta(scene.belief), dense_matrix(scene.belief.precision), data)
    after = scene.belief.fold(data, estimator="laplace").model
    assert dense_theta(after) == pytest.approx(theta, rel=1e-7, abs=1e-9)
    assert dense_matrix(after.precision) == pytest.approx(matrix, rel=1e-7, abs=1e-9)

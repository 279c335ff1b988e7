"""The Muon optimizer (K. Jordan et al., 2024) in float32; torch's own computes in bfloat16, slow on many CPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """For weight matrices: each step moves along the orthogonalized Nesterov momentum of the gradient."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonalize(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.sub_(direction, alpha=group["lr"])


def orthogonalize(matrix: Tensor, n_iterations: int = 5) -> Tensor:
    """All singular values near 1, by Newton-Schulz iterations; a tall matrix is scaled by sqrt(rows / columns)."""
    n_rows, n_columns = matrix.shape
    x = matrix if n_rows <= n_columns else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(n_iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    scaled: Tensor = (x if n_rows <= n_columns else x.T) * math.sqrt(max(1.0, n_rows / n_columns))
    return scaled

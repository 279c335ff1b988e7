"""Linear attention in the reference engine: the gated delta rule, recurrent, for prompts too.

Source: the .mlb specification, "Linear attention"; the numbers of its steps are in the comments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from krafla_cli.formats.mlb import Header
from krafla_cli.runtime.reference_weights import Inputs, Weights

_L2_EPS = 1e-6


@dataclass
class DeltaState:
    """The state of a layer: ``memory`` [V, dk, dv]; ``recent`` [lin_conv - 1, channels], inputs of the convolution."""

    memory: Tensor
    recent: Tensor

    def copy(self) -> DeltaState:
        return DeltaState(self.memory.clone(), self.recent.clone())


class DeltaRule:
    """The computation of a linear-attention layer between its input and output projections."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def new_state(self, device: torch.device) -> DeltaState:
        """The state at position 0: zeros."""
        h = self.header
        memory = torch.zeros(h.lin_v_heads, h.lin_k_dim, h.lin_v_dim, device=device)
        return DeltaState(memory, torch.zeros(h.lin_conv - 1, h.lin_qkv_size, device=device))

    def run(self, state: DeltaState, weights: Weights, inputs: Inputs) -> Tensor:
        """The heads' outputs [T, V, dv] for a layer's quantized or plain inputs; moves ``state`` on."""
        q, k, v = self._split(self._convolve(state, weights, weights.matrices["lqkv"].product(inputs)))
        beta = torch.sigmoid(weights.matrices["lb"].product(inputs))
        # 3. g is the logarithm of the decay
        a = weights.matrices["la"].product(inputs) + weights.vectors["dt_bias"]
        decay = torch.exp(-torch.exp(weights.vectors["A_log"]) * F.softplus(a))
        return self._recur(state, q, k, v, beta, decay)

    def _convolve(self, state: DeltaState, weights: Weights, x: Tensor) -> Tensor:
        """1. Causal convolution of each channel [T, channels] over its last inputs (tap 0 is the oldest), then SiLU."""
        taps = weights.vectors["lconv"].T  # [lin_conv, channels]
        padded = torch.cat((state.recent, x))
        state.recent = padded[len(padded) - len(state.recent) :]
        return F.silu(sum((padded[i : i + len(x)] * tap for i, tap in enumerate(taps)), torch.zeros_like(x)))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """2. Queries and keys, normalized and given to each value head [T, V, dk]; values [T, V, dv]."""
        h = self.header
        k_size = h.lin_k_heads * h.lin_k_dim
        q, k = (
            _l2_normalized(part.reshape(len(x), h.lin_k_heads, h.lin_k_dim)).repeat_interleave(
                h.lin_v_heads // h.lin_k_heads, dim=1
            )
            for part in (x[:, :k_size], x[:, k_size : 2 * k_size])
        )
        v = x[:, 2 * k_size :].reshape(len(x), h.lin_v_heads, h.lin_v_dim)
        return q * h.lin_k_dim**-0.5, k, v

    def _recur(self, state: DeltaState, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """4. S <- S exp(g); S <- S + k (beta (v - S^T k))^T; the output is S^T q."""
        memory = state.memory
        outputs = []
        for t in range(len(q)):
            memory = memory * decay[t, :, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", memory, k[t])
            memory = memory + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", memory, q[t]))
        state.memory = memory
        return torch.stack(outputs)


def _l2_normalized(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)

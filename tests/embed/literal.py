"""A literal transcription of the LEMB specification, section 6, one text at a time, in float32 with torch.

Nothing here is shared with the code under test but the file's codes; names and order of operations are the
specification's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from krafla_cli.formats.lemb import LembModel

FLOAT = torch.float32


def ternary_values(packed: np.ndarray) -> torch.Tensor:
    """Section 5.3: four per byte, low bits = low index; 00 = 0, 01 = +1, 10 = -1."""
    value = {0b00: 0.0, 0b01: 1.0, 0b10: -1.0}
    rows = [[value[(byte >> shift) & 3] for byte in row for shift in (0, 2, 4, 6)] for row in packed.tolist()]
    return torch.tensor(rows, dtype=FLOAT)


def int4_values(packed: np.ndarray) -> torch.Tensor:
    """Section 5.3: low nibble = element 2k, signed."""
    rows = [[float(n - 16 if n > 7 else n) for byte in row for n in (byte & 15, byte >> 4)] for row in packed.tolist()]
    return torch.tensor(rows, dtype=FLOAT)


@dataclass
class LiteralModel:
    model: LembModel
    codes: list[np.ndarray] = field(default_factory=list)  # every x_quant, in the order of the bitlinear calls
    x_scales: list[np.ndarray] = field(default_factory=list)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.model.arrays[name], np.float32))

    def embedding_lookup(self, ids: Sequence[int]) -> torch.Tensor:
        rows = self.model.arrays["embedding.weight"][list(ids)]
        encoding = self.model.header.embedding_encoding
        if encoding == "fp32":
            return torch.from_numpy(np.array(rows))
        decode = {"int8": lambda r: torch.tensor(r.tolist(), dtype=FLOAT), "int4": int4_values}
        values = decode.get(encoding, ternary_values)(rows)
        return values * self.tensor("embedding.scales")[list(ids)][:, None]

    def layer_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, [x.shape[-1]], self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), 1e-5)

    def bitlinear(self, x: torch.Tensor, name: str, bias: torch.Tensor | None) -> torch.Tensor:
        if self.model.header.weight_encoding == "fp32":
            return F.linear(x, self.tensor(f"{name}.weight"), bias)
        w_ternary = ternary_values(self.model.arrays[f"{name}.weight"])
        scale = self.tensor(f"{name}.scale")
        x_norm = F.layer_norm(x, normalized_shape=[x.shape[-1]], eps=1e-5)
        x_scale = 128.0 / x_norm.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
        x_quant = torch.round(x_norm * x_scale).clamp(-128, 127)
        self.codes.append(x_quant.numpy())
        self.x_scales.append(x_scale.numpy())
        y = x_quant @ w_ternary.T
        if bias is not None:
            y = y + bias
        return y / (scale * x_scale)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n_heads, d_model = self.model.header.n_heads, self.model.header.d_model
        d_head = d_model // n_heads
        heads = []
        for h in range(n_heads):
            part = slice(h * d_head, (h + 1) * d_head)
            heads.append(torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(d_head), dim=-1) @ v[:, part])
        return torch.cat(heads, dim=-1)

    def projected(self, ids: Sequence[int]) -> torch.Tensor:
        n_active = sum(i != self.model.tokenizer.pad_token_id for i in ids)
        x = self.embedding_lookup(ids[:n_active])
        for i in range(self.model.header.n_layers):
            p = f"layers.{i}"
            h = self.layer_norm(x, f"{p}.ln1")
            q = self.bitlinear(h, f"{p}.attn.q", None)
            k = self.bitlinear(h, f"{p}.attn.k", None)
            v = self.bitlinear(h, f"{p}.attn.v", None)
            a = self.attention(q, k, v)
            x = x + self.bitlinear(a, f"{p}.attn.out", self.tensor(f"{p}.attn.out.bias"))
            h = self.layer_norm(x, f"{p}.ln2")
            f = self.bitlinear(h, f"{p}.ffn.up", self.tensor(f"{p}.ffn.up.bias"))
            f = 0.5 * f * (1.0 + torch.erf(f / math.sqrt(2.0)))
            x = x + self.bitlinear(f, f"{p}.ffn.down", self.tensor(f"{p}.ffn.down.bias"))
        x = self.layer_norm(x, "final_ln")
        pooled = x.mean(dim=0)
        return pooled @ self.tensor("projection.weight").T + self.tensor("projection.bias")

    def embed(self, ids: Sequence[int], dims: int) -> np.ndarray:
        out = self.projected(ids)[:dims]
        return (out / torch.linalg.vector_norm(out)).numpy()

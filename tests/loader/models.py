"""Models that load as SGLang's do: fused parameters, padding, tied embeddings, shards, and the odd ones."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Named = Iterable[tuple[str, Any]]


class FusedModel(torch.nn.Module):  # type: ignore[misc]
    """embed [16,8] padded to 20 rows, qkv fused of q [8,8], k [4,8], v [4,8], and a norm; rank `rank` of `world`."""

    def __init__(self, *, tied: bool = False, rank: int = 0, world: int = 1, dtype: Any = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        rows = 16 // world

        def parameter(*shape: int, kind: Any = dtype) -> Any:
            return torch.nn.Parameter(torch.randn(*shape).to(kind), requires_grad=False)

        self.embed = parameter(20, 8)
        self.qkv = parameter(rows, 8)
        self.norm = parameter(8, kind=torch.float32)
        self.head = self.embed if tied else parameter(16, 8)

    def load_weights(self, weights: Named) -> None:
        places = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
        for name, loaded in weights:
            if name == "embed.weight":
                assert loaded.shape == (16, 8), f"{tuple(loaded.shape)} is no embedding"
                self.embed.data[:16].copy_(loaded)
                self.embed.data[16:].fill_(0)
            elif name in places:
                begin, rows = places[name]
                part = rows // self.world
                shard = loaded.narrow(0, self.rank * part, part)
                target = self.qkv.data.narrow(0, begin // self.world, part)
                assert target.shape == shard.shape, f"{name}: {tuple(target.shape)} is not {tuple(shard.shape)}"
                target.copy_(shard)
            elif name == "norm":
                self.norm.data.copy_(loaded)
                self.norm[8:].data.fill_(0)
            elif name == "head" and self.head is not self.embed:
                self.head.data[:] = loaded

    def doubled(self) -> Any:
        return self.norm.data * 2


class TurningModel(FusedModel):
    """Stores its output layer the other way round: a view of what is loaded, still only a copy."""

    def load_weights(self, weights: Named) -> None:
        def turned() -> Named:
            for name, loaded in weights:
                if name == "head":
                    self.head.data.view(8, 16).copy_(loaded.t())
                else:
                    yield name, loaded

        super().load_weights(turned())


class DerivingModel(FusedModel):
    """Computes something from its new weights, as those with absorbed projections do."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights(weights)
        self.twice = self.norm.data * 2

    def doubled(self) -> Any:
        return self.twice


class ConvertingModel(FusedModel):
    """Changes values on the way."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights((name, loaded + 1 if name == "norm" else loaded) for name, loaded in weights)


class ThreadedModel(FusedModel):
    """Copies in threads, as some of SGLang's loaders do."""

    def load_weights(self, weights: Named) -> None:
        with ThreadPoolExecutor() as pool:
            copies = [pool.submit(super(ThreadedModel, self).load_weights, [one]) for one in weights]
            for copy in copies:
                copy.result()


class ReadingModel(FusedModel):
    """Reads a value while it loads."""

    def load_weights(self, weights: Named) -> None:
        super().load_weights((name, loaded + 0 * loaded.sum().item()) for name, loaded in weights)


class TableModel(FusedModel):
    """Looks up in a table where the rows go, as models with experts do."""

    def load_weights(self, weights: Named) -> None:
        table = torch.tensor([[0, 8], [8, 4], [12, 4]])
        for name, loaded in weights:
            if name in "qkv":
                begin, rows = table["qkv".index(name)].tolist()
                self.qkv.data[begin : begin + rows].copy_(loaded)
            else:
                super().load_weights([(name, loaded)])


class LookingModel(FusedModel):
    """What it does depends on the weights that it had before."""

    def load_weights(self, weights: Named) -> None:
        if self.norm.data[0].item() < 1e9:
            super().load_weights(weights)


class ExpertModel(torch.nn.Module):  # type: ignore[misc]
    """Layers of 8 experts: w13 [8, 2 * 4, 6] fused of gate and up [4, 6], w2 [8, 6, 4] of down [6, 4]; rank `rank` of
    `world` has a part of the 4."""

    EXPERTS, INNER, HIDDEN = 8, 4, 6

    def __init__(self, *, layers: int = 2, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.rank, self.part = rank, self.INNER // world
        shapes = {"w13": (self.EXPERTS, 2 * self.part, self.HIDDEN), "w2": (self.EXPERTS, self.HIDDEN, self.part)}
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict(
                {
                    name: torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)
                    for name, shape in shapes.items()
                }
            )
            for _ in range(layers)
        )

    @classmethod
    def shapes(cls, layers: int = 2) -> dict[str, tuple[int, int]]:
        """By name, in the order of a checkpoint."""
        kinds = {"gate": (cls.INNER, cls.HIDDEN), "up": (cls.INNER, cls.HIDDEN), "down": (cls.HIDDEN, cls.INNER)}
        return {
            f"{layer}.{expert}.{kind}": shape
            for layer in range(layers)
            for expert in range(cls.EXPERTS)
            for kind, shape in kinds.items()
        }

    def load_weights(self, weights: Named) -> None:
        begin = self.rank * self.part
        for name, loaded in weights:
            layer, expert, kind = name.split(".")
            held = self.layers[int(layer)]
            if kind == "down":
                held["w2"].data[int(expert)].copy_(loaded.narrow(1, begin, self.part))
            else:
                row = self.part if kind == "up" else 0
                held["w13"].data[int(expert)].narrow(0, row, self.part).copy_(loaded.narrow(0, begin, self.part))

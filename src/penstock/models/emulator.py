"""A compact weather emulator: encode, process, decode on a mesh around the globe.

    grid (rows x columns)  ──▶  mesh (icosahedron, refined)  ──▶  grid
      each point sends to its     messages along edges of          each point receives from
      three nearest nodes         every level of refinement        its three nearest nodes

It is a small network of the kind of GraphCast (Lam et al., 2023,
https://doi.org/10.1126/science.adi2336). An edge has the direction from its receiver to its sender,
*eastward* and *poleward*, and a node its distance from the equator. Neither tells the hemisphere,
so what is learnt in one holds in the other. The caller turns meridional winds poleward (see
`workloads.emulator`).

A grid has equal steps around the globe, from any meridian, and rows from one pole to the other:
with an odd number of rows the first and last are the poles, with an even number they lie half a
step away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ..base import UsageError, require

Points = NDArray[np.float64]
"""Points on the unit sphere, shape (n, 3)."""
Pairs = NDArray[np.int64]
"""Indices of senders and receivers, shape (n, 2)."""
_NEAREST = 3
_PLACE, _AWAY = 2, 3


@dataclass(frozen=True)
class Graph:
    """The edges of a graph: the sender, the receiver and the direction of each."""

    senders: Tensor
    """int64 (edges,)."""
    receivers: Tensor
    where: Tensor
    """Direction of the sender seen from the receiver: eastward, poleward, upward; (edges, 3)."""
    share: Tensor
    """1 / edges of each receiver, (receivers, 1)."""

    def to(self, device: torch.device) -> Graph:
        """The graph on a device."""
        return Graph(*(part.to(device) for part in vars(self).values()))


_OnGrid = tuple[tuple[Tensor, ...], tuple[Graph, Graph, Graph]]


class Messages(nn.Module):
    """Each receiver is updated by the mean of its senders' messages."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.where = nn.Linear(_AWAY, latent)
        # The same as one linear map of an edge's two ends joined, but computed at the nodes: there
        # are far fewer nodes than edges.
        self.sender = nn.Linear(latent, latent, bias=False)
        self.receiver = nn.Linear(latent, latent, bias=False)
        self.tell = nn.Linear(latent, latent)
        self.change = mlp(2 * latent, latent, latent)
        self.norm = nn.LayerNorm(latent)

    def forward(self, sending: Tensor, receiving: Tensor, graph: Graph) -> Tensor:
        """Send messages along the edges of a graph; both tensors are (batch, node, latent)."""
        sent = self.where(graph.where) + self.sender(sending).index_select(1, graph.senders)
        sent = sent + self.receiver(receiving).index_select(1, graph.receivers)
        sent = self.tell(functional.silu(sent))
        received = sent.new_zeros(len(sent), receiving.shape[1], sent.shape[2])
        received = received.index_add(1, graph.receivers, sent) * graph.share.to(sent.dtype)
        changed = self.change(torch.cat([receiving, received.to(receiving.dtype)], dim=-1))
        return receiving + self.norm(changed)


class Emulator(nn.Module):
    """Turns fields (batch, channels, row, column) into fields on the same grid, of any size.

    Args:
        in_channels: Fields that it takes.
        out_channels: Fields that it gives. Before it is trained they are zero.
        latent_size: Values of a node and of a message.
        message_steps: Rounds of messages on the mesh.
        mesh_level: How often each face of the icosahedron is cut into four.
    """

    spatial_axes = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        latent_size: int,
        message_steps: int,
        mesh_level: int,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self._vertices, edges = icosphere(mesh_level)
        self._mesh = graph_of(self._vertices, self._vertices, edges)
        self._grids: dict[tuple[int, int, torch.device], _OnGrid] = {}
        self.from_grid = mlp(in_channels + _PLACE, latent_size, latent_size)
        self.from_mesh = mlp(_PLACE, latent_size, latent_size)
        self.encode = Messages(latent_size)
        self.process = nn.ModuleList(Messages(latent_size) for _ in range(message_steps))
        self.decode = Messages(latent_size)
        self.to_grid = mlp(latent_size, latent_size, out_channels)
        # It begins with zeros, so the forecast that it corrects, such as persistence, is unchanged.
        last = self.to_grid[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, in_channels, rows, columns) to (batch, out_channels, rows, columns)."""
        batch, _, rows, columns = x.shape
        (places, vertices), (up, across, down) = self._geometry(rows, columns, x.device)
        values = x.flatten(2).transpose(1, 2)  # (batch, point, channel)
        grid = self.from_grid(torch.cat([values, places.expand(batch, -1, -1)], dim=-1))
        mesh = self.from_mesh(vertices.expand(batch, -1, -1))
        mesh = self.encode(grid, mesh, up)
        for messages in self.process:
            mesh = messages(mesh, mesh, across)
        grid = self.decode(mesh, grid, down)
        out: Tensor = self.to_grid(grid).transpose(1, 2)
        return out.reshape(batch, self.out_channels, rows, columns)

    def _geometry(self, rows: int, columns: int, device: torch.device) -> _OnGrid:
        """The places of the grid's points and the mesh's nodes, and the graphs between them."""
        key = rows, columns, device
        if key not in self._grids:
            points = grid_points(rows, columns)
            near = nearest(points, self._vertices)
            up = graph_of(points, self._vertices, near)
            down = graph_of(self._vertices, points, near[:, ::-1])
            places = (place_of(points).to(device), place_of(self._vertices).to(device))
            self._grids[key] = places, (up.to(device), self._mesh.to(device), down.to(device))
        return self._grids[key]


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two linear layers with a SiLU between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


def latitudes(rows: int) -> NDArray[np.float64]:
    """Latitudes of the rows of a grid in radians, north first, shape (rows,).

    >>> np.degrees(latitudes(3)), np.degrees(latitudes(2))
    (array([ 90.,   0., -90.]), array([ 45., -45.]))
    """
    if rows % 2:
        return np.linspace(math.pi / 2, -math.pi / 2, rows) if rows > 1 else np.zeros(1)
    return math.pi * (0.5 - (np.arange(rows) + 0.5) / rows)


def grid_points(rows: int, columns: int) -> Points:
    """The points of a grid, row by row."""
    # Half a step off the planes of symmetry of the icosahedron: there a point would have more
    # than three nearest nodes.
    longitudes = (np.arange(columns) + 0.5) * (2 * math.pi / columns)
    latitude, longitude = np.meshgrid(latitudes(rows), longitudes, indexing="ij")
    shadow = np.cos(latitude)
    points = [shadow * np.cos(longitude), shadow * np.sin(longitude), np.sin(latitude)]
    return np.stack(points, axis=-1).reshape(-1, 3)


def icosphere(level: int) -> tuple[Points, Pairs]:
    """Nodes of an icosahedron whose faces were cut into four ``level`` times, and the edges of
    every level, in both directions.

    >>> [len(icosphere(level)[0]) for level in range(4)]
    [12, 42, 162, 642]
    """
    golden = (1 + math.sqrt(5)) / 2
    corners = [
        point
        for a in (-1.0, 1.0)
        for b in (-golden, golden)
        for point in ((0.0, a, b), (a, b, 0.0), (b, 0.0, a))
    ]
    points = np.array(corners) / math.hypot(1, golden)
    edges = _edges(points)
    every = [edges]
    for _ in range(level):  # each edge gets a node in its middle
        middles = points[edges].sum(axis=1)
        points = np.concatenate([points, middles / np.linalg.norm(middles, axis=1, keepdims=True)])
        edges = _edges(points)
        every.append(edges)
    pairs = np.concatenate(every)
    return points, np.concatenate([pairs, pairs[:, ::-1]])


def _edges(points: Points) -> Pairs:
    """The edges between points of a sphere: those of their convex hull's triangles, once each."""
    faces = require("scipy.spatial", "train").ConvexHull(points).simplices
    pairs = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
    return np.unique(pairs, axis=0).astype(np.int64)


def nearest(points: Points, vertices: Points) -> Pairs:
    """Each point with each of its nearest vertices."""
    tree = require("scipy.spatial", "train").cKDTree(vertices)
    _, near = tree.query(points, k=_NEAREST)
    return np.stack([np.repeat(np.arange(len(points)), _NEAREST), near.ravel()], axis=1)


def graph_of(senders: Points, receivers: Points, pairs: Pairs) -> Graph:
    """The graph of pairs (sender, receiver), as indices into the two sets of points."""
    at, seen = receivers[pairs[:, 1]], senders[pairs[:, 0]]
    shadow = np.maximum(np.hypot(at[:, 0], at[:, 1]), 1e-9)[:, None]
    east = np.stack([-at[:, 1], at[:, 0], np.zeros(len(at))], axis=1) / shadow
    away = seen - at
    eastward, northward, upward = ((away * axis).sum(1) for axis in (east, np.cross(at, east), at))
    height = np.round(at[:, 2], 9)  # on the equator both directions are poleward
    poleward = np.where(height == 0, np.abs(northward), northward * np.sign(height))
    where = np.stack([eastward, poleward, upward], axis=1)
    where /= max(float(np.abs(where).max()), 1e-9)
    counts = np.maximum(np.bincount(pairs[:, 1], minlength=len(receivers)), 1)
    return Graph(
        torch.from_numpy(pairs[:, 0].copy()),
        torch.from_numpy(pairs[:, 1].copy()),
        torch.from_numpy(where).float(),
        torch.from_numpy(1.0 / counts).float()[:, None],
    )


def place_of(points: Points) -> Tensor:
    """The distance of points from the equator: the sine of the latitude without its sign, and the
    cosine; shape (points, 2)."""
    height = torch.from_numpy(points[:, 2]).abs().clamp(max=1.0)
    return torch.stack([height, (1 - height**2).sqrt()], dim=1).float()


def emulator(
    in_channels: int = 9, latent_size: int = 64, message_steps: int = 4, mesh_level: int = 3
) -> Emulator:
    """An emulator with as many output fields as input fields."""
    if mesh_level > 7:
        raise UsageError(f"mesh_level {mesh_level}: 7 has 163,842 nodes, and no grid needs more")
    return Emulator(
        in_channels,
        in_channels,
        latent_size=latent_size,
        message_steps=message_steps,
        mesh_level=mesh_level,
    )


latent_32, latent_64, latent_128, latent_256, latent_512 = (
    partial(emulator, latent_size=size) for size in (32, 64, 128, 256, 512)
)
"""The same in five sizes, each a model for ``--model-type penstock.models.emulator:latent_64``."""

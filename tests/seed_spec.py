"""The output spec of the seed's own job, key by key."""

from collections.abc import Sequence
from typing import Any


def seed_out_spec(
    kvstore: dict[str, Any], shape: Sequence[int], chunks: Sequence[int]
) -> dict[str, Any]:
    """The seed's spec in another place, with a smaller shape and smaller chunks."""
    return {
        "driver": "zarr2",
        "kvstore": kvstore,
        "context": {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 16},
            "s3_request_concurrency": {"limit": 32},
        },
        "path": "0",
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
        "metadata": {
            "shape": list(shape),
            "zarr_format": 2,
            "fill_value": 0,
            "chunks": list(chunks),
            "compressor": {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1},
            "dimension_separator": "/",
            "dtype": "<u2",
        },
        "create": True,
        "delete_existing": True,
    }

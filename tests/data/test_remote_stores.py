"""Stores in a bucket and behind a web server."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.data import Box, open_source, overlap
from penstock.data.stores import kvstore, tensorstore
from penstock.data.stores.kvstore import kvstore_of, open_kvstore

from ..loading.kit import Quiet, served, signed
from ..seed_spec import seed_out_spec
from .kit import DATA, DOMAIN, SHAPE, build_ome_zarr_05, open_out, write


class TestS3:
    @pytest.mark.slow
    def test_the_benchmarks_own_specs(self, s3_endpoint: str) -> None:
        bucket = {"driver": "s3", "bucket": "test-bucket", "aws_region": "us-west-2"}
        kvstore = {**bucket, "path": "out.zarr", "endpoint": s3_endpoint}
        sink = open_out(seed_out_spec(kvstore, SHAPE, [1, 1, 5, 13, 17]))  # each is a request
        assert sink.local_path is None and sink.write_grid == (1, 1, 5, 13, 17)
        sink.create()
        sink.write(DOMAIN, DATA)
        in_spec = {
            "driver": "zarr",
            "kvstore": {**bucket, "path": "out.zarr/0", "endpoint": s3_endpoint},
            "context": {
                "cache_pool": {"total_bytes_limit": 4_000_000_000},
                "data_copy_concurrency": {"limit": 16},
                "s3_request_concurrency": {"limit": 32},
            },
        }
        source = open_source(in_spec)
        assert source.cache_bytes == 4_000_000_000
        np.testing.assert_array_equal(source.read(DOMAIN), DATA)
        assert overlap(source, sink)

    @pytest.mark.slow
    @pytest.mark.parametrize("key", ["a.ome.zip", "some/a.ozx"])
    def test_a_zip_file_in_a_bucket(self, key, s3_endpoint, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        made = shutil.make_archive(f"{tmp_path}/a", "zip", build_ome_zarr_05(tmp_path))
        root = open_kvstore(kvstore_of("s3://test-bucket"), "")
        root.write(key, Path(made).read_bytes()).result()
        source = open_source(f"s3://test-bucket/{key}")
        np.testing.assert_array_equal(source.read(DOMAIN), DATA)
        assert source.with_cache(2**20).read(DOMAIN).sum() == DATA.sum(dtype="u8")

    @pytest.mark.slow
    def test_plain_urls(self, s3_endpoint: str, monkeypatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        domain = Box.of((0,) * 5, (1, 1, *SHAPE[2:]))  # one chunk
        for name in ("a.zarr", "a.n5"):
            url = f"s3://test-bucket/some/{name}"
            sink = open_out(url, domain)
            with pytest.raises(UsageError, match="neither an OME-Zarr image nor"):
                open_source(url)  # nothing is created yet
            sink.create()
            sink.write(domain, DATA[domain.slices])
            source = open_source(url)
            np.testing.assert_array_equal(source.read(domain), DATA[domain.slices])
            assert source.name == url
            with pytest.raises(UsageError, match=f"{url}: exists; use --overwrite"):
                open_out(url, domain)
            open_out(url, domain, overwrite=True).create()
            assert open_source(url).read(domain).sum() == 0
            open_kvstore(kvstore_of(url), url).write("notes.txt", b"mine").result()
            with pytest.raises(UsageError, match=f"{url}: also holds notes.txt"):
                open_out(url, domain, overwrite=True)
        spec = {"driver": "n5", "kvstore": "s3://test-bucket/some/a.n5"}
        assert open_source(spec).domain == domain

    @pytest.mark.slow
    def test_a_bucket_that_is_not_there(self, s3_endpoint: str, monkeypatch: Any) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        with pytest.raises(UsageError, match=r"s3://no-bucket/a\.zarr: neither"):
            open_source("s3://no-bucket/a.zarr")
        with pytest.raises(UsageError, match=r"no-bucket/a: .*does not exist$"):
            open_source({"driver": "zarr", "kvstore": "s3://no-bucket/a"})
        for out in ("s3://no-bucket/a.zarr", "s3://no-bucket/a.n5"):
            with pytest.raises(UsageError, match=f"{out}: NoSuchBucket: .*does not exist$"):
                open_out(out)

    def test_a_server_that_is_not_there(self, s3_endpoint: str, monkeypatch: Any) -> None:
        for room in (kvstore, tensorstore):
            monkeypatch.setattr(room, "BRIEF", {"s3_request_retries": {"max_retries": 0}})
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        for spec in ("s3://test-bucket/a", {"driver": "zarr", "kvstore": "s3://test-bucket/a"}):
            with pytest.raises(UsageError, match="Could not connect"):
                open_source(spec)


class TestHttp:
    def test_a_web_server_is_read_and_never_written(self, tmp_path) -> None:
        path = build_ome_zarr_05(tmp_path)
        with served(tmp_path) as url:
            source = open_source(f"{url}/{path.name}")
            box = Box.of((1, 2, 3, 4, 5), (1, 1, 3, 3, 3))
            np.testing.assert_array_equal(source.read(box), open_source(path).read(box))
            with pytest.raises(UsageError, match="cannot be written over HTTP"):
                open_out(f"{url}/out.zarr")

    def test_a_signature_stays_behind_the_path(self, tmp_path) -> None:
        """The server refuses requests without it, and what a run keeps of its input lacks it."""
        path, query = build_ome_zarr_05(tmp_path), "?part=2&sig=s1gnature"

        with served(tmp_path, signed(query)) as host:
            url = f"{host}/{path.name}"
            for place in (f"{url}{query}", f"{url}/{query}"):
                box = Box.of((1, 2, 3, 4, 5), (1, 1, 3, 3, 3))
                seen = open_source(place).read(box)
                np.testing.assert_array_equal(seen, open_source(path).read(box))
            named = open_source(f"{url}::s0{query}")
            np.testing.assert_array_equal(named.read(box), open_source(path).read(box))
            with pytest.raises(UsageError, match=r"403\]$"):
                open_source(f"{url}{query}::s0")  # of a query, colons are a part
            kept = kvstore.address(open_kvstore(kvstore_of(f"{url}{query}"), "").spec())
            assert "part=2" in kept and "s1gnature" not in kept

    def test_a_zip_file_behind_a_signature(self) -> None:
        signed = "https://host/a.ome.zip?sig=a/b.zip"
        assert kvstore_of(signed) == kvstore_of(f"{signed}/") == f"{signed}|zip:"
        assert kvstore_of("https://host/a.zip/x/y?sig=b") == "https://host/a.zip?sig=b|zip:x/y/"

    def test_a_server_that_sends_elsewhere(self, tmp_path) -> None:
        class Moved(Quiet):
            def do_GET(self) -> None:
                self.send_response(302)
                self.send_header("Content-Length", "0")
                self.end_headers()

        with served(tmp_path, Moved) as url, pytest.raises(UsageError, match=r"give that$"):
            open_source(f"{url}/a.zarr")

    def test_a_server_that_denies_what_it_lacks_is_read(self, tmp_path) -> None:
        """As a bucket does that may be read and not listed."""
        write("zarr", tmp_path / "a.zarr", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})

        class Denying(Quiet):
            def do_GET(self) -> None:
                if Path(self.translate_path(self.path)).is_file():
                    return super().do_GET()
                return self.send_error(403)

        with served(tmp_path, Denying) as url:
            source = open_source({"driver": "zarr", "kvstore": f"{url}/a.zarr/"})
            np.testing.assert_array_equal(source.read(source.domain)[0, 0], DATA[0, 0])

"""Key-value stores below paths and URLs: opening, listing and deleting, and their errors in plain
words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ...base import (
    STORE_FILES,
    Deferred,
    PenstockError,
    UsageError,
    absolute,
    at_home,
    describe,
    is_draft,
    is_of_store,
    json_object,
    redact,
    scrub,
)
from .protocols import ZIPS


def read_key(url: str, key: str, *, strict: bool = False) -> bytes | None:
    """The bytes of one object.

    Args:
        url: the URL that it lies below.
        key: its name below the URL.
        strict: raise where access is denied. A store that may be read but not listed also denies
            access to a missing key; by default that is None.

    Returns:
        The bytes, None where there is no such object.

    Raises:
        UsageError: the store does not answer.
    """
    return reader_of(open_kvstore(kvstore_of(f"{url}/"), url), url, strict=strict)(key)


def reader_of(root: Any, where: str, *, strict: bool = False) -> Callable[[str], bytes | None]:
    """A function that reads the objects of an open ``ts.KvStore``, as `read_key`, and raises errors
    in plain words."""

    def read(key: str) -> bytes | None:
        try:
            with explained_errors(where):
                read = root.read(key).result()
        except UsageError as error:
            if strict or "PERMISSION_DENIED" not in str(error.__cause__):
                raise
            return None
        return bytes(read.value) if read.state == "value" else None

    return read


ts = Deferred("tensorstore", "infer")

METADATA_FILES = (*STORE_FILES, ".zattrs", ".zmetadata")
"""All metadata files. The last two prove nothing by themselves."""
# A store has this key from the start of its deletion until another store stands in its place. It
# holds the paths of the arrays, for a run that comes after a killed deletion.
DELETING = ".penstock-deleting"
# Keys of a store: metadata files and chunks, such as 0.0.1, 0/0/1, c/0/1 or c.0.1.
_PART = r"(?:c|(?:c\.)?\d+(?:\.\d+)*)"
_NAMES = "|".join(map(re.escape, (*METADATA_FILES, DELETING)))
_STORE_KEY = re.compile(rf"(?:{_PART}/)*(?:{_PART}|{_NAMES})")


_IN_ZIP = re.compile(rf"(.+(?:{'|'.join(map(re.escape, ZIPS))}))/?(.*?)/*", re.IGNORECASE)
"""The path or URL of a zip file, and the path of a store in it."""
_LONGEST = 300  # characters of a message

BRIEF = {
    f"{kind}_request_retries": {"max_retries": 4, "initial_delay": "100ms", "max_delay": "1s"}
    for kind in ("http", "s3", "gcs")
}
"""TensorStore's own tries of one request, two seconds in all: without them one busy answer would
cost a block of a thousand chunks. By default TensorStore tries silently for a quarter of an hour,
also to find a host whose name has a typing error. Here a longer fault is an error; the reader or
writer counts it and tries again."""


def _folder(path: str) -> Path:
    """The folder of a local store. Raises `UsageError` if TensorStore must not open it."""
    folder = absolute(path)
    if "\\" in str(folder) and os.sep == "/":
        raise UsageError(f"{scrub(path)}: TensorStore takes its backslash for a slash; rename it")
    for marker in METADATA_FILES:
        if Path(folder, marker).exists() and not Path(folder, marker).is_file():
            # To open a pipe would wait for ever for its other end.
            raise UsageError(f"{scrub(path)}: {marker} is no regular file")
    return folder


def place_and_name(place: str) -> tuple[str, str]:
    """``FILE::NAME`` in two, the name empty if there is none. The colons of a URL's host and query
    are its own.

    >>> place_and_name("http://[::1]:80/a.zarr::x?sig=b::c")
    ('http://[::1]:80/a.zarr?sig=b::c', 'x')
    """
    if host := re.match(r"\w+://[^/?]*", place):
        path, mark, query = place[host.end() :].partition("?")
        file, _, inside = path.partition("::")
        return f"{host[0]}{file}{mark}{query}", inside
    # The name of a file may hold the mark itself.
    here = (each for each in (place, place.rpartition("::")[0]) if os.path.lexists(at_home(each)))
    file = next(filter(None, here), place.partition("::")[0])
    return file, place[len(file) + 2 :]


def kvstore_of(path: str) -> Any:
    """The TensorStore key-value store whose keys lie below a path or URL.

    AWS_ENDPOINT_URL, the standard variable, redirects ``s3://`` to another server.

    Raises:
        UsageError: the URL of a bucket holds a login or a port. A key may hold a slash, so that
            no text of such a URL is safe to show. Or a path holds a backslash.
    """
    if re.match(r"\s*(s3|gs)://[^/?|]*[:@]", path, re.IGNORECASE):
        scheme, _, _ = path.strip().partition("://")
        raise UsageError(
            f"a {scheme}:// address names a bucket and a key, without a login or a port; give keys "
            "by the environment or a profile, and another server by AWS_ENDPOINT_URL"
        )
    if path.startswith("file://"):
        head, *chain = path.split("|", 1)
        path = "|".join([f"file://{quote(settled_spec(unquote(head[7:])))}", *chain])
    is_local = "://" not in path.partition("|")[0]
    if "|" in path and not is_local:  # a chain of TensorStore's, such as a zip file in a bucket
        return path
    place, mark, query = (path, "", "") if is_local else path.rstrip("/").partition("?")
    if (zipped := _IN_ZIP.fullmatch(place)) and (not is_local or Path(zipped[1]).is_file()):
        above, _, file = zipped[1].rpartition("/")
        base, inner = kvstore_of(above or "."), f"{zipped[2]}/".lstrip("/")
        if isinstance(base, str):
            return f"{base}{file}{mark}{query}|zip:{inner}"
        return {"driver": "zip", "base": {**base, "path": base["path"] + file}, "path": inner}
    if is_local:
        return {"driver": "file", "path": f"{_folder(path)}/"}
    path = f"{place.rstrip('/')}/{mark}{query}"  # names below it come before the query
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if path.startswith("s3://") and endpoint:
        url = urlsplit(path)
        key = unquote(url.path).lstrip("/")
        return {"driver": "s3", "bucket": url.netloc, "path": key, "endpoint": endpoint}
    return path


def open_kvstore(spec: Any, where: str) -> Any:
    """The open ``ts.KvStore`` of a spec or URL."""
    with explained_errors(where):
        return ts.KvStore.open(spec, context=ts.Context(BRIEF)).result()


def open_to_write(path: str, where: str) -> Any:
    """The open ``ts.KvStore`` below a path or URL; `UsageError` for one in a zip file, all of which
    TensorStore would write anew for each chunk."""
    root = open_kvstore(kvstore_of(path), where)
    if root.spec().to_json()["driver"] == "zip":
        raise UsageError(f"{where}: lies in a zip file, which is only read; give another place")
    return root


def is_store(root: Any, where: str) -> bool:
    """Whether Zarr or N5 metadata lies there, or the rest of a deletion that was killed.

    A folder with other files raises `UsageError`. A folder that holds only folders, or only a key
    that a killed run was writing, counts as empty.
    """
    with explained_errors(where):
        reads = {marker: root.read(marker).result() for marker in (*METADATA_FILES, DELETING)}
    files = {marker: read.value for marker, read in reads.items() if read.state == "value"}
    if DELETING in files:
        return True
    if any(is_of_store(files.get(name, b"")) for name in STORE_FILES):
        return True
    folder = local_path(root.spec())
    if files or (folder and folder.exists() and (not folder.is_dir() or _holds_files(folder))):
        raise UsageError(f"{where}: holds something that is no Zarr or N5 store; it is left alone")
    return False


def _holds_files(folder: Path) -> bool:
    names = (name for _, _, names in os.walk(folder) for name in names)
    return not all(name.endswith(".__lock") for name in names)


def half_deleted(root: Any) -> list[str] | None:
    """The paths of the arrays of a store whose deletion was killed; None for any other store."""
    try:
        read = root.read(DELETING).result()
    except (ValueError, OSError, NotImplementedError):  # the next read says why
        return None
    if read.state != "value":
        return None
    return [str(path) for path in json_object(read.value).get("arrays", ())]


def check_deletable(root: Any, where: str, arrays: Sequence[str] = ()) -> None:
    """Refuse to delete a store with keys that are no part of a Zarr or N5 array.

    Deleting removes all keys below the store. ``arrays`` are the paths of arrays that its metadata
    lists. All keys are listed, which costs less than deleting them.
    """
    with explained_errors(where):
        keys = [key.decode(errors="replace") for key in root.list().result()]
    prefixes = tuple(f"{path.strip('/')}/" for path in arrays)
    foreign = []
    for key in keys:
        prefix = next((p for p in prefixes if key.startswith(p)), "")
        is_key = _STORE_KEY.fullmatch(key.removeprefix(prefix))
        if not (is_key or is_draft(key.rpartition("/")[2])):
            foreign.append(key)
    if foreign:
        first, *rest = sorted(foreign)
        others = f" and {len(rest)} more" if rest else ""
        raise UsageError(
            f"{where}: also holds {first}{others}, which is not part of the array; nothing is "
            "deleted, so move it away or write elsewhere"
        )


def local_path(spec: Any) -> Path | None:
    """The folder of a ``ts.KvStore.Spec``, None where it is not in a file system."""
    parts = spec.to_json() if spec else {}
    return Path(parts["path"]) if parts.get("driver") == "file" else None


def store_folder(spec: Mapping[str, Any], array: Path | None) -> Path | None:
    """The folder of the store that a local array lies in: above the spec's ``path``, which leads
    into a group.

    A key-value store may be a folder of many stores. Then it is the first folder on the way that is
    named like a store.
    """
    if array is None:
        return None
    depth = len(Path(innermost(spec).get("path", "").strip("/")).parts)
    folders = [array, *array.parents][depth::-1]
    named = (folder for folder in folders if folder.suffix in (".zarr", ".n5"))
    return next(named, folders[0] if folders[0].name else array)


def innermost(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the array that views and casts are of."""
    while isinstance(spec.get("base"), Mapping):
        spec = spec["base"]
    return spec


def address(spec: Any) -> str:
    """The canonical text of a place, however a ``ts.KvStore.Spec`` names it."""
    return _address(spec.to_json()) if spec else "no key-value store"


def _address(parts: Mapping[str, Any]) -> str:
    path = parts.get("path", "").rstrip("/")
    if parts["driver"] == "file":
        return str(Path(path).resolve())
    base = _address(parts["base"]) if isinstance(parts.get("base"), Mapping) else ""
    host, mark, query = (parts.get("endpoint") or parts.get("base_url", "")).partition("?")
    places = base, host.rstrip("/"), parts.get("bucket"), path.lstrip("/")
    return redact(f"{parts['driver']}://{'/'.join(filter(None, places))}{mark}{query}")


@contextmanager
def explained_errors(where: str, kind: type[PenstockError] = UsageError) -> Iterator[None]:
    """A context that turns TensorStore's errors into one sentence.

    Args:
        where: What the sentence begins with.
        kind: The kind of error that has it.

    Yields:
        Nothing.

    Raises:
        PenstockError: TensorStore raised an error; it is of that kind.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise kind(f"{scrub(where)}: {first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """The message of a TensorStore error in one line, without keys and its dump of the spec."""
    text = re.sub(r"\s*\[(source locations|[\w-]+)=.*", "", str(error), flags=re.DOTALL)
    text = re.sub(r'^([A-Z_]+: )?(Error opening "\w+" driver: )?', "", text)
    cut = r"\1 is damaged or cut: it is not valid JSON"
    text = re.sub(r'^Error reading (?:local file )?"(.*)": Invalid JSON$', cut, text)
    text = re.sub(r"All \d+ retry attempts failed: ", "", text)
    text = re.sub(r"^Failed to find valid ZIP EOCD.*", "is a damaged zip file", text)
    if codec := re.search(r'member "(filters)"|"(?:name|id)": "([^"]+)" is not registered', text):
        codecs = "filters of Zarr 2" if codec[1] else codec[2]
        text = (
            f"its chunks pass through {codecs}, and such are not read here; copy the array by "
            "zarr-python, without them"
        )
    answer = re.search(r"http_response_code='(\d+)'", str(error))
    if answer is not None and text.endswith("Unknown"):
        text = f"{text.removesuffix('Unknown')}the server answered with HTTP {answer[1]}"
    elsewhere = "the server answers that this lies at another address; give that"
    text = re.sub(r"Unknown \[HTTP code 3\d\d\]$", elsewhere, text)
    line = scrub(describe(ValueError(text)))
    # The reason stands at the end, behind paths.
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


def settled_spec(path: str) -> str:
    """An absolute path that keeps its slash at the end."""
    return f"{absolute(path)}{'/' * path.endswith('/')}"

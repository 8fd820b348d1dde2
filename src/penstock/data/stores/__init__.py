"""One file per kind of store, each imported only when a spec asks for it."""

from __future__ import annotations

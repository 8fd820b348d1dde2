"""The old import path of `penstock.Loader`."""

from .loading import Loader as Loader

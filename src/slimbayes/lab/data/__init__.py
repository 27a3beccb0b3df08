"""Data sets by name, batches, corruptions and shifts."""

from slimbayes.containers import archives, batches, datasets, files, streaming, streams  # noqa: F401 - attributes
from slimbayes.containers.batches import Batches
from slimbayes.containers.datasets import DataError, Dataset, Scaling, Split
from slimbayes.containers.files import find_root
from slimbayes.containers.streaming import StreamBatches, StreamedDataset, stream
from slimbayes.containers.streams import ImageTree, TarShards
from slimbayes.lab.data.columns import read_table
from slimbayes.lab.data.images import load_images
from slimbayes.lab.data.inputs import read_inputs
from slimbayes.lab.data.records import Bagging, Events, RecordBatches, RecordDataset, Records
from slimbayes.lab.data.registry import Found, describe, found, load, load_records, names
from slimbayes.lab.data.shifts import OutOfDistribution, Shift, out_of_distribution, shift_names, shifts_for

base = datasets  # as its module was called before

__all__ = [
    "Bagging",
    "Batches",
    "DataError",
    "Dataset",
    "Events",
    "Found",
    "ImageTree",
    "OutOfDistribution",
    "RecordBatches",
    "RecordDataset",
    "Records",
    "Scaling",
    "Shift",
    "Split",
    "StreamBatches",
    "StreamedDataset",
    "TarShards",
    "describe",
    "find_root",
    "found",
    "load",
    "load_images",
    "load_records",
    "names",
    "out_of_distribution",
    "read_inputs",
    "read_table",
    "shift_names",
    "shifts_for",
    "stream",
]

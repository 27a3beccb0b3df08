"""Data sets by name, batches, corruptions and shifts."""

from slimbayes.data.base import DataError, Dataset, Scaling, Split
from slimbayes.data.batches import Batches
from slimbayes.data.columns import read_table
from slimbayes.data.files import find_root
from slimbayes.data.images import load_images
from slimbayes.data.inputs import read_inputs
from slimbayes.data.records import Bagging, Events, RecordBatches, RecordDataset, Records
from slimbayes.data.registry import Found, describe, found, load, load_records, names
from slimbayes.data.shifts import OutOfDistribution, Shift, out_of_distribution, shift_names, shifts_for
from slimbayes.data.streaming import StreamBatches, StreamedDataset, stream
from slimbayes.data.streams import ImageTree, TarShards

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

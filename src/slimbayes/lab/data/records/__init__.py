"""Records of timed events: medical ones, in bags of time, padded in batches."""

from slimbayes.containers.bagging import Bagged, Bagging, Levels, bag, carried
from slimbayes.containers.records import Events, RecordBatches, RecordDataset, Records
from slimbayes.lab.data.records.mimic import mimic3
from slimbayes.lab.data.records.physionet import physionet2012

__all__ = [
    "Bagged",
    "Bagging",
    "Events",
    "Levels",
    "RecordBatches",
    "RecordDataset",
    "Records",
    "bag",
    "carried",
    "mimic3",
    "physionet2012",
]

"""Frozen models as files: torch.export programs, ONNX, and int8 weights."""

from slimbayes.verbs.exporting.int8 import quantize
from slimbayes.verbs.exporting.onnx_file import OnnxModel, read_metadata, to_onnx
from slimbayes.verbs.exporting.programs import ExportError, save_program, to_program

__all__ = ["ExportError", "OnnxModel", "quantize", "read_metadata", "save_program", "to_onnx", "to_program"]

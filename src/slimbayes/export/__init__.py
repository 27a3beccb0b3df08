"""Frozen models as files: torch.export programs, ONNX, and int8 weights."""

from slimbayes.export.int8 import quantize
from slimbayes.export.onnx_file import OnnxModel, read_metadata, to_onnx
from slimbayes.export.programs import ExportError, save_program, to_program

__all__ = ["ExportError", "OnnxModel", "quantize", "read_metadata", "save_program", "to_onnx", "to_program"]

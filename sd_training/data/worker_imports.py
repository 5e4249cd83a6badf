"""What every loader process needs, imported once by the server that they are forked from."""

from transformers import CLIPTokenizer, PreTrainedTokenizerFast

from sd_training.data import loader, parquet_source, tar_source

__all__ = ["CLIPTokenizer", "PreTrainedTokenizerFast", "loader", "parquet_source", "tar_source"]

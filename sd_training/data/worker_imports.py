"""What every loader process needs, imported once by the server that they are forked from."""

from transformers import CLIPTokenizer, PreTrainedTokenizerFast

from sd_training.data import loader
from sd_training.data.sources import parquet as parquet_source
from sd_training.data.sources import tar as tar_source

__all__ = ["CLIPTokenizer", "PreTrainedTokenizerFast", "loader", "parquet_source", "tar_source"]

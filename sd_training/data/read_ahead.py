"""Large reads for a file that is read in small pieces from front to back, as a remote tar file is when indexed."""

from collections import OrderedDict

from sd_training.data.byte_files import ByteFile

BLOCK_BYTES = 8 << 20
_BLOCKS_KEPT = 4


class ReadAhead:
    """A `ByteFile` that fetches whole blocks of another one and keeps the last few."""

    def __init__(self, file: ByteFile, block_bytes: int = BLOCK_BYTES) -> None:
        self.file, self.size, self._block_bytes = file, file.size, block_bytes
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def pread(self, length: int, offset: int) -> bytes:
        """`length` bytes from `offset`; errors are the file's."""
        if offset < 0 or length > self._block_bytes or offset + length > self.size:
            return self.file.pread(length, offset)
        parts = []
        while length > 0:
            number, start = divmod(offset, self._block_bytes)
            parts.append(self._block(number)[start : start + length])
            length, offset = length - len(parts[-1]), offset + len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """The file is closed by who opened it."""

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * self._block_bytes
            self._blocks[number] = self.file.pread(min(self._block_bytes, self.size - start), start)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

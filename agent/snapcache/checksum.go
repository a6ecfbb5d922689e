package snapcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const chunkSize = 64 << 10

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	zeroChunk  [chunkSize]byte
)

// checksum returns the CRC-32C of a file's chunks of 64 KiB that are not all zero, each preceded by its number (8 bytes,
// little endian). Holes need not be read, and a sparse file and its dense copy have the same checksum.
func checksum(f *os.File) (string, error) {
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return "", err
	}
	var (
		sum   uint32
		chunk [chunkSize]byte
		index [8]byte
	)
	for off := int64(0); off < size; off += chunkSize {
		if off, err = nextData(f, off, size); err != nil || off >= size {
			break
		}
		n, err := f.ReadAt(chunk[:min(chunkSize, size-off)], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if bytes.Equal(chunk[:n], zeroChunk[:n]) {
			continue
		}
		binary.LittleEndian.PutUint64(index[:], uint64(off/chunkSize))
		sum = crc32.Update(sum, castagnoli, index[:])
		sum = crc32.Update(sum, castagnoli, chunk[:n])
	}
	return fmt.Sprintf("%08x", sum), err
}

// nextData returns the chunk that holds the next data at or after off, size if there is none. File systems without
// SEEK_DATA read everything.
func nextData(f *os.File, off, size int64) (int64, error) {
	data, err := f.Seek(off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO): // only a hole is left
		return size, nil
	case errors.Is(err, unix.EINVAL):
		return off, nil
	case err != nil:
		return 0, err
	}
	return max(off, data/chunkSize*chunkSize), nil
}

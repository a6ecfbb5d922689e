package snapshot

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ZeroSum is the checksum of n zero bytes, n at most ChunkBytes.
func ZeroSum(n int) uint32 {
	if n == ChunkBytes {
		return zeroChunkSum
	}
	return Checksum(make([]byte, n))
}

var zeroChunkSum = Checksum(make([]byte, ChunkBytes))

// VerifyFlat compares a flat memory image with the checksums of a state. Holes of a file are not read: they are zeros.
func VerifyFlat(r io.ReaderAt, memoryBytes uint64, sums []uint32) error {
	buf := make([]byte, ChunkBytes)
	data := uint64(0) // before this offset and from the current one on, there is a hole
	for i, sum := range sums {
		off := uint64(i) * ChunkBytes
		b := buf[:min(ChunkBytes, memoryBytes-off)]
		part := fmt.Sprintf("memory, bytes %d-%d", off, off+uint64(len(b))-1)
		if data < off {
			data = NextData(r, off, memoryBytes)
		}
		if data >= off+uint64(len(b)) {
			if sum != ZeroSum(len(b)) {
				return bad(part, ErrChecksum)
			}
			continue
		}
		if n, err := r.ReadAt(b, int64(off)); n < len(b) {
			return badOrIO(part, err)
		}
		if Checksum(b) != sum {
			return bad(part, ErrChecksum)
		}
	}
	return nil
}

// NextData returns where the next data of a sparse flat image begins: off if that cannot be told, end if there is only a hole
// left up to the end. A file shorter than end has data at its end: reading it there tells. It moves the file's seek position.
func NextData(r io.ReaderAt, off, end uint64) uint64 {
	f, ok := r.(*os.File)
	if !ok {
		return off
	}
	if info, err := f.Stat(); err != nil || uint64(info.Size()) < end {
		return off
	}
	at, err := f.Seek(int64(off), unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return end
	case err != nil:
		return off
	}
	return uint64(at)
}

// VerifyState reads a state file and checks every byte of it.
func VerifyState(path string) error {
	_, err := ReadState(path)
	return err
}

// InspectState reads and verifies a state file for display. Register blocks and device states are in it, as bytes.
func InspectState(path string) (*State, error) { return ReadState(path) }

// InspectDiff reads and verifies the header and table of a diff file.
func InspectDiff(path string) (DiffInfo, []Run, error) {
	var (
		info DiffInfo
		runs []Run
	)
	err := withFile(path, func(f *os.File) error {
		d, err := OpenDiff(f)
		if err == nil {
			info, runs = d.Info, d.Runs
		}
		return err
	})
	return info, runs, err
}

// VerifyDiff checks every byte of a diff file, and that it belongs to the state.
func VerifyDiff(path string, s *State) error {
	return withFile(path, func(f *os.File) error {
		d, err := OpenDiff(f)
		if err != nil {
			return err
		}
		if err := s.Owns(d.Info); err != nil {
			return err
		}
		return d.Verify()
	})
}

// VerifyMemory checks the flat image that belongs to the state: its memory file if that is full, its base if it is a diff.
func VerifyMemory(path string, s *State) error {
	return withFile(path, func(f *os.File) error { return VerifyFlat(f, s.Shape.MemoryBytes, s.Memory.Sums) })
}

// Owns reports, as an *Error, whether the diff with this header was saved together with s.
func (s *State) Owns(d DiffInfo) error {
	if s.Memory.Kind != Diff || s.ID != d.ID || s.Shape.MemoryBytes != d.MemoryBytes {
		return bad("diff header", fmt.Errorf("%w: diff %v, state %v", ErrMismatch, d.ID, s.ID))
	}
	return nil
}

func withFile(path string, f func(*os.File) error) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open snapshot: %w", err)
	}
	defer func() { _ = file.Close() }()
	return f(file)
}

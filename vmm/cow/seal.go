package cow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
)

// The seal's layout; FORMAT.md is the specification.
const (
	sealMagic = "TORPSEAL"
	sealBytes = 4096
	sealCRC   = 12
	sealUsed  = 16 // the rest is zero
	sumBytes  = 4
	pageSums  = BlockSize / sumBytes
)

// frozen reports whether the layer was sealed or the sealing was begun.
func (l *layer) frozen() bool {
	size, err := l.f.size()
	return l.sealed || err != nil || size != l.fileSize()
}

// marshalSeal is the seal of a layer whose map has the checksum mapSum.
func marshalSeal(mapSum uint32) []byte {
	b := append(make([]byte, 0, sealBytes), sealMagic...)
	b = binary.LittleEndian.AppendUint32(b, mapSum)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return b[:sealBytes]
}

// readSeal reports whether there is a seal; a layer whose sealing was cut off has none.
func (l *layer) readSeal() (bool, error) {
	got := make([]byte, sealBytes)
	if _, err := l.f.ReadAt(got, l.sealOffset()); err != nil {
		return false, fmt.Errorf("read disk layer: %w", err)
	}
	bad := func(detail string) (bool, error) { return false, &CorruptError{l.path, "seal", detail} }
	switch {
	case isZero(got):
		return false, nil
	case string(got[:len(sealMagic)]) != sealMagic:
		return bad("this is no seal")
	case crc32.Checksum(got[:sealCRC], castagnoli) != binary.LittleEndian.Uint32(got[sealCRC:]):
		return bad("checksum differs")
	case !isZero(got[sealUsed:]):
		return bad("reserved bytes are set")
	case binary.LittleEndian.Uint32(got[len(sealMagic):]) != l.m.sum():
		return bad("it is for another map")
	}
	return true, nil
}

// Seal adds a checksum of every stored block to the layer at path, for Verify. It reads all data once, and the layer can be
// read meanwhile. A sealed layer is never written again; nor is one whose sealing was cut off, which Seal takes up again. A
// layer of version 1 cannot be sealed and is left as it is.
func Seal(path string) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("seal disk layer: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := (file{f}).lock(); err != nil {
		return fmt.Errorf("seal disk layer: %w", err)
	}
	l, err := loadLayer(path, file{f})
	if err == nil && !l.sealed && l.version != oldVersion {
		err = l.seal()
	}
	if err != nil {
		return fmt.Errorf("seal disk layer: %w", err)
	}
	return nil
}

// seal writes the sums and then the seal: so whoever finds a seal finds what it stands for.
func (l *layer) seal() error {
	if err := l.f.resize(l.sealedSize()); err != nil {
		return err
	}
	sums := sumWriter{l: l}
	buf := make([]byte, min(copyBytes, l.virtualSize))
	err := l.eachData(func(b, n int64) error {
		if err := l.read(buf[:n*BlockSize], b); err != nil {
			return err
		}
		return sums.add(b, buf[:n*BlockSize])
	})
	if err != nil {
		return err
	}
	if err := sums.flush(); err != nil {
		return err
	}
	return l.writeSeal()
}

// writeSeal writes the seal itself, when the sums are written.
func (l *layer) writeSeal() error {
	if err := l.f.sync(); err != nil {
		return err
	}
	if _, err := l.f.WriteAt(marshalSeal(l.m.sum()), l.sealOffset()); err != nil {
		return err
	}
	return l.f.sync()
}

// sumWriter writes the sums of blocks in ascending order, by pages.
type sumWriter struct {
	l    *layer
	page int64
	raw  [BlockSize]byte
	used bool // raw has sums
}

// add takes the bytes of whole blocks from b on.
func (w *sumWriter) add(b int64, p []byte) error {
	for ; len(p) > 0; b, p = b+1, p[BlockSize:] {
		if page := b / pageSums; page != w.page {
			if err := w.flush(); err != nil {
				return err
			}
			w.page = page
		}
		binary.LittleEndian.PutUint32(w.raw[b%pageSums*sumBytes:], crc32.Checksum(p[:BlockSize], castagnoli))
		w.used = true
	}
	return nil
}

func (w *sumWriter) flush() error {
	if !w.used {
		return nil
	}
	_, err := w.l.f.WriteAt(w.raw[:], w.l.fileSize()+w.page*BlockSize)
	w.raw, w.used = [BlockSize]byte{}, false
	return err
}

// Verify checks all there is to check in a layer: header, map, size, that every stored block can be read, and, of a sealed
// layer, that it is what it was when it was sealed.
func Verify(path string) error {
	l, err := openLayer(path)
	if err != nil {
		return err
	}
	defer l.f.Close()
	return l.verify()
}

func (l *layer) verify() error {
	var sums [copyBytes / BlockSize * sumBytes]byte
	buf := make([]byte, min(copyBytes, l.virtualSize))
	return l.eachData(func(b, n int64) error {
		if err := l.read(buf[:n*BlockSize], b); err != nil || !l.sealed {
			return err
		}
		if _, err := l.f.ReadAt(sums[:n*sumBytes], l.fileSize()+b*sumBytes); err != nil {
			return fmt.Errorf("read disk layer: %w", err)
		}
		for i := range n {
			if crc32.Checksum(buf[i*BlockSize:(i+1)*BlockSize], castagnoli) != binary.LittleEndian.Uint32(sums[i*sumBytes:]) {
				return &CorruptError{l.path, "data", fmt.Sprintf("checksum of block %d differs", b+i)}
			}
		}
		return nil
	})
}

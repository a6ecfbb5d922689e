package cow

import (
	"errors"
	"fmt"
	"os"
)

// Merge writes a new layer at dst, which must not exist, that stands for the given layers, oldest first, and seals it. Blocks
// found to be zero are stored as such; the others share their room with the old ones where the file system has reflinks. dst
// is durable when Merge returns, except for its directory, and is gone if it fails. The layers must not be written meanwhile.
func Merge(dst string, layers ...string) (err error) {
	if len(layers) == 0 {
		return errors.New("merge disk layers: there are none")
	}
	from, err := OpenChain("", layers, "")
	if err != nil {
		return fmt.Errorf("merge disk layers: %w", err)
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	if err := Create(dst, from.Size()); err != nil {
		return fmt.Errorf("merge disk layers: %w", err)
	}
	if err := mergeInto(dst, from); err != nil {
		return fmt.Errorf("merge disk layers: %w", errors.Join(err, os.Remove(dst)))
	}
	return nil
}

func mergeInto(dst string, from *Chain) (err error) {
	to, err := OpenChain("", nil, dst)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	return mergeChain(to, from)
}

// merger copies blocks in ascending order.
type merger struct {
	to      *Chain
	sums    sumWriter
	reflink bool // worth to be tried
}

// mergeChain merges from into the empty chain to.
func mergeChain(to, from *Chain) error {
	m := merger{to, sumWriter{l: to.top}, true}
	if err := to.top.f.resize(to.top.sealedSize()); err != nil {
		return err
	}
	buf := make([]byte, min(copyBytes, from.size))
	for b := int64(0); b < from.size/BlockSize; {
		l, s, n := from.find(b, min(from.size/BlockSize-b, copyBytes/BlockSize))
		switch {
		case l == nil:
		case s == zero:
			to.mark(blocks{b, n}, zero)
		default:
			if err := l.read(buf[:n*BlockSize], b); err != nil {
				return err
			}
			if err := m.store(buf[:n*BlockSize], b, l); err != nil {
				return err
			}
		}
		b += n
	}
	if err := m.sums.flush(); err != nil {
		return err
	}
	if err := to.Flush(); err != nil {
		return err
	}
	return to.top.writeSeal()
}

// store stores whole blocks p from b on, which were read from the layer l; those that are zero become zero blocks.
func (m *merger) store(p []byte, b int64, l *layer) error {
	for len(p) > 0 {
		n := int64(1)
		empty := isZero(p[:BlockSize])
		for n*BlockSize < int64(len(p)) && isZero(p[n*BlockSize:(n+1)*BlockSize]) == empty {
			n++
		}
		if empty {
			m.to.mark(blocks{b, n}, zero)
		} else if err := m.storeData(p[:n*BlockSize], b, l); err != nil {
			return err
		}
		p, b = p[n*BlockSize:], b+n
	}
	return nil
}

func (m *merger) storeData(p []byte, b int64, l *layer) error {
	top := m.to.top
	at := b * BlockSize
	m.reflink = m.reflink && top.f.clone(top.dataOffset()+at, l.f, l.dataOffset()+at, int64(len(p)))
	if !m.reflink {
		if err := top.writev(vec{p}, at); err != nil {
			return err
		}
	}
	m.to.mark(blocks{b, int64(len(p)) / BlockSize}, data)
	return m.sums.add(b, p)
}

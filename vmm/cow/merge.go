package cow

import (
	"errors"
	"fmt"
	"os"
)

// Merge writes a new layer at dst, which must not exist, that stands for the given layers, oldest first. Blocks found to be
// zero are stored as such. dst is durable when Merge returns, except for its directory, and is gone if it fails. The layers
// must not be written meanwhile.
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
	buf := make([]byte, copyBytes)
	blocks := from.Size() / BlockSize
	for b := int64(0); b < blocks; {
		l, s, n := from.find(b, min(blocks-b, copyBytes/BlockSize))
		switch {
		case l == nil:
		case s == zero:
			to.zeroLocked(b, n)
		default:
			if err := l.read(buf[:n*BlockSize], b); err != nil {
				return err
			}
			if err := to.storeLocked(buf[:n*BlockSize], b); err != nil {
				return err
			}
		}
		b += n
	}
	return to.Flush()
}

// storeLocked writes whole blocks from b on; those that are zero become zero blocks.
func (c *Chain) storeLocked(p []byte, b int64) error {
	for len(p) > 0 {
		n := int64(1)
		empty := isZero(p[:BlockSize])
		for n*BlockSize < int64(len(p)) && isZero(p[n*BlockSize:(n+1)*BlockSize]) == empty {
			n++
		}
		if empty {
			c.zeroLocked(b, n)
		} else if err := c.top.writeAt(p[:n*BlockSize], b*BlockSize); err != nil {
			return err
		} else {
			c.top.m.set(b, n, data)
		}
		p, b = p[n*BlockSize:], b+n
	}
	return nil
}

package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
)

// Digest names a memory: a base image by the checksums of its chunks, a layer by its header and its table, which has a checksum
// of every run. FORMAT.md says what exactly is hashed.
type Digest [sha256.Size]byte

func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// IsZero reports whether d names nothing.
func (d Digest) IsZero() bool { return d == Digest{} }

// BaseDigest names the flat memory image of the given size whose chunks have these checksums.
func BaseDigest(memoryBytes uint64, sums []uint32) Digest {
	e := encoder(baseMagic)
	e.u64(memoryBytes)
	for _, sum := range sums {
		e.u32(sum)
	}
	return sha256.Sum256(e)
}

// baseMagic makes sure that no layer can have the digest of a base.
const baseMagic = "TORPORBM"

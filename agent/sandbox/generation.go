package sandbox

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/vmmpb"
)

// maxMemoryChain is how many memory layers a generation may have: a restore looks into every one.
const maxMemoryChain = 4

// oldMemoryFile is the memory of a generation of an earlier version, on which no layer can be put.
const oldMemoryFile = "mem.diff"

// generationPlan is how one generation is made.
type generationPlan struct {
	number   uint64
	dir      string
	manifest snapcache.Manifest
	kind     vmmpb.SaveKind
	file     string              // what the VMM writes its memory to
	below    *snapcache.Snapshot // whose memory files are shared; nil for none
}

// memoryName is what generation n calls the memory file it makes; later generations have it under the same name. It is none of those
// below, which may have been numbered by another sandbox.
func memoryName(n uint64, below []string) string {
	name := fmt.Sprintf("mem-%d", n)
	for i := 1; slices.Contains(below, name); i++ {
		name = fmt.Sprintf("mem-%d-%d", n, i)
	}
	return name
}

// planGeneration decides what generation n holds of a VM with the record r: as little as can be written. A VM that was restored from
// a generation adds a layer to that one's, if these are not too many already and can be had; else all that differs from
// the flat memory below them is written once more, and of a VM that was booted, or whose base is lost, all there is.
func (s *Sandbox) planGeneration(r store.Sandbox, n uint64) generationPlan {
	p := generationPlan{
		number: n, dir: s.paths.generation(n), kind: vmmpb.SaveKind_SAVE_KIND_DIFF,
		manifest: snapcache.Manifest{
			Kind: "generation", Owner: s.id, Generation: n, Incarnation: r.Incarnation, Parent: r.TemplateDigest,
			Layers: r.Layers, VCPUs: r.VCPUs, MemoryBytes: r.MemoryBytes, DiskBytes: r.DiskBytes, EnvdVersion: r.EnvdVersion,
			CreatedAt: now(),
		},
	}
	m := &p.manifest
	if r.Base > 0 {
		below, err := s.load(r.Base)
		if err != nil {
			s.log.Warn().Err(err).Msg("the generation this VM was restored from is lost; its whole memory is saved")
			p.kind = vmmpb.SaveKind_SAVE_KIND_FULL
		} else {
			p.below, m.Base, m.Memory = below, below.Manifest.Base, slices.Clone(below.Manifest.Memory)
		}
	}
	p.file = memoryName(n, m.MemoryFiles())
	switch {
	case r.Booted, p.kind == vmmpb.SaveKind_SAVE_KIND_FULL:
		p.kind, m.Base, m.Memory = vmmpb.SaveKind_SAVE_KIND_FULL, p.file, []string{}
		return p
	case len(m.Memory) >= maxMemoryChain, slices.Contains(m.Memory, oldMemoryFile):
		p.kind, m.Memory = vmmpb.SaveKind_SAVE_KIND_CUMULATIVE, nil
	}
	m.Memory = append(m.Memory, p.file)
	return p
}

// load is snapcache.Load of a generation.
func (s *Sandbox) load(n uint64) (*snapcache.Snapshot, error) {
	return snapcache.Load(s.paths.generation(n))
}

// begin makes the draft with everything in it that exists already.
func (p generationPlan) begin(cache snapcache.Cache) (*snapcache.Draft, error) {
	draft, err := cache.Begin(p.dir)
	if err != nil {
		return nil, err
	}
	if err := p.link(draft); err != nil {
		return nil, errors.Join(err, draft.Discard())
	}
	return draft, nil
}

// link puts the memory below into a draft.
func (p generationPlan) link(draft *snapcache.Draft) error {
	for _, name := range p.manifest.MemoryFiles() {
		if name == p.file {
			continue
		}
		if err := draft.Link(p.below, name, name); err != nil {
			return err
		}
	}
	return nil
}

// sums are those of the files that a VMM wrote, as it answered.
func (p generationPlan) sums(saved *vmmpb.SaveResponse) map[string]snapcache.Sum {
	known := map[string]snapcache.Sum{stateFile: {SHA256: hex.EncodeToString(saved.StateSha256)}}
	digest := hex.EncodeToString(saved.MemoryDigest)
	if p.kind == vmmpb.SaveKind_SAVE_KIND_FULL {
		known[p.file] = snapcache.Sum{Flat: digest}
	} else {
		known[p.file] = snapcache.Sum{Layer: digest}
	}
	return known
}

// needs is how many bytes a snapshot of a VM with so much resident memory can take, at most.
func (p generationPlan) needs(resident uint64) uint64 {
	bytes := resident
	if p.kind == vmmpb.SaveKind_SAVE_KIND_CUMULATIVE && p.below != nil {
		for _, name := range p.below.Manifest.Memory {
			bytes += snapcache.Allocated(p.below.Path(name)) // what was never touched is mapped, not resident
		}
	}
	if p.kind == vmmpb.SaveKind_SAVE_KIND_FULL && p.below != nil {
		bytes += p.below.AllocatedBytes()
	}
	return bytes
}

// generations lists the numbers of the generations on the disk, oldest first.
func (s *Sandbox) generations() []uint64 {
	entries, err := os.ReadDir(s.paths.dir)
	if err != nil {
		return nil
	}
	var all []uint64
	for _, e := range entries {
		if n, ok := generationOf(e.Name()); ok {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

// superfluous returns which of the generations can go. A generation has proven itself when a VM was restored from it: base is the
// newest that has. It stays, as do those after it that are the newest or the one before; everything else has been replaced.
func superfluous(all []uint64, base, newest uint64) []uint64 {
	var before uint64 // the one before the newest
	for _, n := range all {
		if n < newest {
			before = max(before, n)
		}
	}
	var gone []uint64
	for _, n := range all {
		if n < base || n < newest && n != base && n != before {
			gone = append(gone, n)
		}
	}
	return gone
}

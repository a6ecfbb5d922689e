package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"torpor/agent/snapcache"
	"torpor/agent/vmproc"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
	"torpor/vmm/snapshot"
)

// pages is the memory of a fake guest: a short text in each page that is not zero.
type pages map[uint64]string

// fakeMemory is the size of a fake guest's memory.
const fakeMemory = 1 << 20

// fakeState is what the state file of a fake VM says: the layers that its memory goes with.
type fakeState struct{ Disk []string }

func pageOf(text string) []byte {
	b := make([]byte, snapshot.PageSize)
	copy(b, text)
	return b
}

// fakeBase is the digest of every base.
var fakeBase = snapshot.Digest{1}

// writeLayer writes pages as a memory layer; from is what they are compared with, below the name of what it lies upon.
func writeLayer(path string, now, from pages, below snapshot.Digest) (snapshot.Digest, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return snapshot.Digest{}, err
	}
	defer f.Close()
	b := snapshot.NewLayerBuilder(snapshot.LayerInfo{MemoryBytes: fakeMemory, Base: fakeBase, Parent: below})
	for _, n := range slices.Sorted(maps.Keys(now)) {
		if now[n] == from[n] {
			continue
		}
		if err := b.Add(snapshot.RunData, n, 1); err != nil {
			return snapshot.Digest{}, err
		}
		r := &b.Runs[len(b.Runs)-1]
		r.Sum = snapshot.Checksum(pageOf(now[n]))
		if _, err := f.WriteAt(pageOf(now[n]), int64(r.Offset)); err != nil {
			return snapshot.Digest{}, err
		}
	}
	info, err := b.Finish(f)
	return info.Digest, errors.Join(err, f.Sync())
}

// readLayer puts the pages of a layer over those that are there, and returns its name.
func readLayer(path string, into pages) (snapshot.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return snapshot.Digest{}, err
	}
	defer f.Close()
	d, err := snapshot.OpenLayer(f, "the layer")
	if err != nil {
		return snapshot.Digest{}, err
	}
	for _, r := range d.Runs {
		b := make([]byte, r.Bytes())
		if err := d.ReadRun(r, b); err != nil {
			return snapshot.Digest{}, err
		}
		for i := range uint64(r.Pages) {
			into[r.Page+i] = string(bytes.TrimRight(b[i*snapshot.PageSize:][:snapshot.PageSize], "\x00"))
		}
	}
	return d.Info.Name(), nil
}

// writeFlat writes pages as a flat memory.
func writeFlat(path string, now pages) (snapshot.Digest, error) {
	all := make([]byte, fakeMemory)
	for n, text := range now {
		copy(all[n*snapshot.PageSize:], pageOf(text))
	}
	var sums []uint32
	for off := 0; off < fakeMemory; off += snapshot.ChunkBytes {
		sums = append(sums, snapshot.Checksum(all[off:off+snapshot.ChunkBytes]))
	}
	return snapshot.BaseDigest(fakeMemory, sums), os.WriteFile(path, all, 0o600)
}

func readFlat(path string) (pages, error) {
	all, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	got := pages{}
	for n := 0; n < len(all)/snapshot.PageSize; n++ {
		if text := string(bytes.TrimRight(all[n*snapshot.PageSize:][:snapshot.PageSize], "\x00")); text != "" {
			got[uint64(n)] = text
		}
	}
	return got, nil
}

// fakeVM is one agent's hold of a process.
type fakeVM struct {
	vmmpb.VMMService // nil: what a sandbox does not call
	w                *world
	p                *proc
	once             sync.Once
	done             chan struct{}
	let              chan struct{} // closed by Detach
}

func newFakeVM(w *world, p *proc) *fakeVM {
	v := &fakeVM{w: w, p: p, done: make(chan struct{}), let: make(chan struct{})}
	go func() {
		select {
		case <-p.gone:
		case <-v.let:
		}
		close(v.done)
	}()
	return v
}

func (v *fakeVM) Identity() vmproc.Identity { return v.p.id }
func (v *fakeVM) Done() <-chan struct{}     { return v.done }
func (v *fakeVM) Ended() string             { return "signal: killed" }
func (v *fakeVM) Detach()                   { v.once.Do(func() { close(v.let) }) }

func (v *fakeVM) Kill(ctx context.Context) error {
	if err := v.w.call(ctx, "kill", v.p.name); err != nil {
		return err
	}
	select {
	case <-v.let:
		return errors.New("let go of")
	default:
	}
	v.w.mu.Lock()
	v.w.dieLocked(v.p)
	v.w.mu.Unlock()
	<-v.done
	return nil
}

func (v *fakeVM) Stop(ctx context.Context, _ time.Duration) error {
	if err := v.w.call(ctx, "stop", v.p.name); err != nil {
		return err
	}
	return v.Kill(ctx)
}

// in runs f on the process if it lives and its guest is in one of the states.
func (v *fakeVM) in(ctx context.Context, op string, states []string, f func() error) error {
	if err := v.w.call(ctx, op, v.p.name); err != nil {
		return err
	}
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	if v.w.procs[v.p.name] != v.p {
		return errors.New("ttrpc: closed")
	}
	if !slices.Contains(states, v.p.state) {
		return apierr.New(apierr.Internal, "%s while %s", op, v.p.state)
	}
	return f()
}

// runsLocked has the guest run. It may write to its top from now on, which must not be part of any snapshot. w.mu is held.
func (v *fakeVM) runsLocked() {
	v.p.state = "running"
	top := v.p.top
	v.p.disk[len(v.p.disk)-1].written = true
	generations, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(top)), genPrefix+"*"))
	if err != nil {
		v.w.breachLocked(err.Error())
	}
	for _, dir := range generations {
		if m, err := snapcache.Manifested(dir); err == nil && slices.Contains(m.Layers, filepath.Base(top)) {
			v.w.breachLocked(fmt.Sprintf("%s runs on layer %s, which is part of %s", v.p.name, top, filepath.Base(dir)))
		}
	}
}

func (w *world) breachLocked(what string) { w.breaches = append(w.breaches, what) }

// fakeLayer is what the world knows of a disk layer.
type fakeLayer struct {
	id      string
	written bool         // a guest may have written to it
	merged  []*fakeLayer // what it was made of
}

// newLayer tells of a layer that was made at path, of others or of none.
func (w *world) newLayer(path string, of []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nextID++
	l := &fakeLayer{id: fmt.Sprintf("layer %d", w.nextID)}
	for _, o := range of {
		l.merged = append(l.merged, w.layerLocked(o))
	}
	w.layers[inode(path)] = l
}

func (w *world) layerLocked(path string) *fakeLayer {
	if l := w.layers[inode(path)]; l != nil {
		return l
	}
	w.breachLocked("nobody made the layer " + path)
	return &fakeLayer{}
}

func inode(path string) uint64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// contents names what a disk of these layers holds: the layers that were written to, whatever they were merged into.
func contents(disk []*fakeLayer) []string {
	var all []string
	for _, l := range disk {
		all = append(all, l.contents()...)
	}
	return all
}

func (l *fakeLayer) contents() []string {
	var all []string
	for _, m := range l.merged {
		all = append(all, m.contents()...)
	}
	if l.written {
		all = append(all, l.id)
	}
	return all
}

// takeDisk opens the disk of a machine.
func (v *fakeVM) takeDisk(m *vmmpb.Machine) error {
	d := m.Disks[0]
	for _, path := range append([]string{d.Top}, d.Layers...) {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	v.p.disk, v.p.top = nil, d.Top
	for _, path := range append(slices.Clone(d.Layers[1:]), d.Top) {
		v.p.disk = append(v.p.disk, v.w.layerLocked(path))
	}
	return nil
}

func (v *fakeVM) Boot(ctx context.Context, r *vmmpb.BootRequest) (*vmmpb.BootResponse, error) {
	return &vmmpb.BootResponse{}, v.in(ctx, "boot", []string{"idle"}, func() error {
		if r.Kernel == "" || r.Initrd == "" {
			return errors.New("nothing to boot")
		}
		if err := v.takeDisk(r.Machine); err != nil {
			return err
		}
		v.p.memory, v.p.booted = pages{0: "booted"}, true
		v.runsLocked()
		return nil
	})
}

func (v *fakeVM) Restore(ctx context.Context, r *vmmpb.RestoreRequest) (*vmmpb.RestoreResponse, error) {
	err := v.in(ctx, "restore", []string{"idle"}, func() error {
		memory, err := readFlat(r.BaseMemory)
		below := fakeBase
		for _, l := range r.MemoryLayers {
			name, lerr := readLayer(l, memory)
			below, err = name, errors.Join(err, lerr)
		}
		err = errors.Join(err, v.takeDisk(r.Machine))
		raw, rerr := os.ReadFile(r.State)
		if err = errors.Join(err, rerr); err != nil {
			return err
		}
		if len(raw) > 0 { // the template's is empty
			var st fakeState
			if err := json.Unmarshal(raw, &st); err != nil {
				return err
			}
			if got := contents(v.p.disk); !slices.Equal(got, st.Disk) {
				v.w.breachLocked(fmt.Sprintf("%s was restored on disk %q, its memory was saved with %q", v.p.name, got, st.Disk))
			}
		}
		v.p.memory, v.p.restored, v.p.below = memory, maps.Clone(memory), below
		v.runsLocked()
		return nil
	})
	return &vmmpb.RestoreResponse{}, err
}

func (v *fakeVM) Pause(ctx context.Context, _ *vmmpb.PauseRequest) (*vmmpb.PauseResponse, error) {
	return &vmmpb.PauseResponse{}, v.in(ctx, "pause", []string{"running", "paused"}, func() error { v.p.state = "paused"; return nil })
}

func (v *fakeVM) Resume(ctx context.Context, _ *vmmpb.ResumeRequest) (*vmmpb.ResumeResponse, error) {
	return &vmmpb.ResumeResponse{}, v.in(ctx, "resume", []string{"running", "paused"}, func() error { v.runsLocked(); return nil })
}

func (v *fakeVM) Save(ctx context.Context, r *vmmpb.SaveRequest) (*vmmpb.SaveResponse, error) {
	var saved *vmmpb.SaveResponse
	err := v.in(ctx, "save", []string{"paused"}, func() (err error) {
		saved, err = v.saveLocked(r)
		return err
	})
	if err == nil {
		err = v.w.call(ctx, "saved", v.p.name)
	}
	return saved, err
}

func (v *fakeVM) saveLocked(r *vmmpb.SaveRequest) (*vmmpb.SaveResponse, error) {
	state, err := json.Marshal(fakeState{contents(v.p.disk)})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(state)
	var digest snapshot.Digest
	switch r.Kind {
	case vmmpb.SaveKind_SAVE_KIND_FULL:
		digest, err = writeFlat(r.Memory, v.p.memory)
	case vmmpb.SaveKind_SAVE_KIND_DIFF:
		if v.p.booted {
			return nil, apierr.New(apierr.BadRequest, "the machine was booted: there is nothing to differ from")
		}
		digest, err = writeLayer(r.Memory, v.p.memory, v.p.restored, v.p.below)
	case vmmpb.SaveKind_SAVE_KIND_CUMULATIVE:
		digest, err = writeLayer(r.Memory, v.p.memory, nil, fakeBase)
	default:
		err = errors.New("no kind")
	}
	if err = errors.Join(err, os.WriteFile(r.State, state, 0o600)); err != nil {
		return nil, err
	}
	v.w.made(r.State)
	v.w.made(r.Memory)
	for _, top := range r.Tops {
		if _, err := os.Stat(top); err != nil {
			return nil, err
		}
		v.p.disk, v.p.top = append(v.p.disk, v.w.layerLocked(top)), top
	}
	return &vmmpb.SaveResponse{StateSha256: sum[:], MemoryDigest: digest[:]}, nil
}

func (v *fakeVM) Checkpoint(ctx context.Context, r *vmmpb.CheckpointRequest) (*vmmpb.CheckpointResponse, error) {
	var saved *vmmpb.SaveResponse
	err := v.in(ctx, "checkpoint", []string{"running"}, func() (err error) {
		saved, err = v.saveLocked(&vmmpb.SaveRequest{Kind: r.Kind, State: r.State, Memory: r.Memory, Tops: r.Tops})
		v.runsLocked()
		return err
	})
	return &vmmpb.CheckpointResponse{Saved: saved}, err
}

func (v *fakeVM) Status(ctx context.Context, _ *vmmpb.StatusRequest) (*vmmpb.StatusResponse, error) {
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	if v.w.procs[v.p.name] != v.p {
		return nil, errors.New("ttrpc: closed")
	}
	return &vmmpb.StatusResponse{State: v.p.state, EndReason: v.p.endReason, ResidentBytes: 1 << 20}, ctx.Err()
}

func (v *fakeVM) Wait(ctx context.Context, _ *vmmpb.WaitRequest) (*vmmpb.WaitResponse, error) {
	select {
	case <-v.p.guestEnd:
		return &vmmpb.WaitResponse{Reason: v.p.endReason}, nil
	case <-v.done:
		return nil, errors.New("ttrpc: closed")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (v *fakeVM) Quit(context.Context, *vmmpb.QuitRequest) (*vmmpb.QuitResponse, error) {
	return &vmmpb.QuitResponse{}, nil
}

// kept lists the names of a sandbox's layers that are on the disk.
func (r *rig) kept(id string) []string {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.cfg.Dir, id, "layers", "*"))
	if err != nil {
		r.t.Fatal(err)
	}
	return files
}

// verifyAll reads every generation of a sandbox whole.
func (r *rig) verifyAll(id string) {
	r.t.Helper()
	dirs, err := filepath.Glob(filepath.Join(r.cfg.Dir, id, genPrefix+"*"))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, dir := range dirs {
		if strings.HasSuffix(dir, ".tmp") {
			continue
		}
		s, err := snapcache.Load(dir)
		if err == nil {
			err = s.Verify()
		}
		if err != nil {
			r.t.Errorf("%s: %v", filepath.Base(dir), err)
		}
	}
}

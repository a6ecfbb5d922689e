package machine

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"torpor/vmm/cow"
)

// testHost is the host of all tests; nil without KVM, for which needKVM skips a test.
var testHost = sync.OnceValue(func() *Host {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	defer dev.Close()
	h, err := OpenHost(dev, KVMModule())
	if err != nil {
		return nil
	}
	return h
})

func openFile(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// savedFiles names the files of a snapshot; open opens them for one restore.
type savedFiles struct {
	state, base, diff string
	below             []string // layers between base and diff
}

func (s savedFiles) open(t *testing.T) Snapshot {
	t.Helper()
	out := Snapshot{State: openFile(t, s.state, os.O_RDONLY), Base: openFile(t, s.base, os.O_RDONLY)}
	for _, path := range s.below {
		out.Layers = append(out.Layers, openFile(t, path, os.O_RDONLY))
	}
	if s.diff != "" {
		out.Layers = append(out.Layers, openFile(t, s.diff, os.O_RDONLY))
	}
	return out
}

// saveTo saves into new files at two paths.
func saveTo(t *testing.T, m *Machine, kind SaveKind, state, memory string) (Saved, error) {
	t.Helper()
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
	return m.Save(SaveOptions{Kind: kind}, openFile(t, state, create), openFile(t, memory, create))
}

func listenVsock(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// fullConfig is a machine with one of everything, and all files of it.
func fullConfig(t *testing.T) (Config, []interface{ Close() error }) {
	t.Helper()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, layer := range []string{"layer", "top"} {
		if err := cow.Create(path(layer), mib); err != nil {
			t.Fatal(err)
		}
	}
	base, layer, top := openFile(t, path("base"), os.O_CREATE|os.O_RDWR), openFile(t, path("layer"), os.O_RDONLY), openFile(t, path("top"), os.O_RDWR)
	log, vsock := openFile(t, path("log"), os.O_CREATE|os.O_RDWR), listenVsock(t, path("vsock"))
	cfg := testConfig(1, 128*mib)
	cfg.Disks = []Disk{{ID: "d", Base: base, Layers: []*os.File{layer}, Top: top}}
	cfg.Vsock = &Vsock{CID: 3, Listener: vsock}
	cfg.Console = &Console{Log: log}
	return cfg, []interface{ Close() error }{base, layer, top, log, vsock}
}

func checkClosed(t *testing.T, files ...interface{ Close() error }) {
	t.Helper()
	for i, f := range files {
		if err := f.Close(); !errors.Is(err, os.ErrClosed) && !errors.Is(err, net.ErrClosed) {
			t.Errorf("file %d was left open (%v)", i, err)
		}
	}
}

func TestTheMachineClosesItsFiles(t *testing.T) {
	needKVM(t)
	cfg, files := fullConfig(t)
	image := openFile(t, kernelOf(t, tinyCode), os.O_RDONLY)
	m, err := Boot(cfg, Kernel{Image: image, Initrd: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY)}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	counts(t, m, 0)
	full, _ := save(t, m, "")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	checkClosed(t, append(files, image)...)

	cfg, files = fullConfig(t)
	from := full.open(t)
	if m, _, err = Restore(cfg, from, true, zerolog.Nop()); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	checkClosed(t, append(files, from.State, from.Base)...)
}

func TestAFailedMachineClosesItsFiles(t *testing.T) {
	needKVM(t)
	boot := func(cfg Config) ([]interface{ Close() error }, error) {
		k := Kernel{Image: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY), Initrd: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY)}
		_, err := Boot(cfg, k, zerolog.Nop())
		return []interface{ Close() error }{k.Image, k.Initrd}, err
	}
	restore := func(cfg Config) ([]interface{ Close() error }, error) {
		s := Snapshot{State: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY), Base: openFile(t, "/dev/null", os.O_RDONLY), Layers: []*os.File{openFile(t, "/dev/null", os.O_RDONLY)}}
		_, _, err := Restore(cfg, s, true, zerolog.Nop())
		return []interface{ Close() error }{s.State, s.Base, s.Layers[0]}, err
	}
	for _, c := range []struct {
		name  string
		spoil func(*Config)
		start func(Config) ([]interface{ Close() error }, error)
	}{
		{"bad configuration", func(c *Config) { c.VCPUs = 0 }, boot},
		{"a disk that is none", func(c *Config) { c.Disks[0].Base, c.Disks[0].Layers[0] = c.Disks[0].Layers[0], c.Disks[0].Base }, boot},
		{"too little memory", func(c *Config) { c.MemoryBytes = 1 }, boot},
		{"bad configuration of a restore", func(c *Config) { c.VCPUs = 0 }, restore},
		{"no snapshot", func(*Config) {}, restore},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, files := fullConfig(t)
			c.spoil(&cfg)
			more, err := c.start(cfg)
			if err == nil {
				t.Fatal("it started")
			}
			checkClosed(t, append(files, more...)...)
		})
	}
}

package hostvm

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Instance is one emulated host, running or not.
type Instance struct {
	name string
	root string // <cache>/hostvm
	dir  string // <cache>/hostvm/<name>
}

// CacheDir answers where slow things are kept: $TORPOR_CACHE, or ~/.cache/torpor.
func CacheDir() (string, error) {
	if d := os.Getenv("TORPOR_CACHE"); d != "" {
		return filepath.Abs(d)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no cache directory: %w; set TORPOR_CACHE", err)
	}
	return filepath.Join(home, ".cache", "torpor"), nil
}

// Open names an instance under a cache directory. It touches nothing and does not fail if the instance is not running
// or was never made.
func Open(cache, instance string) (*Instance, error) {
	if !validName(instance) {
		return nil, fmt.Errorf("instance name %q: 1 to 32 of a-z, 0-9 and -", instance)
	}
	root := filepath.Join(cache, "hostvm")
	return &Instance{name: instance, root: root, dir: filepath.Join(root, instance)}, nil
}

func validName(s string) bool {
	return s != "" && len(s) <= 32 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && s[0] != '-'
}

// Console is the path of the console log. The file is there once the instance was started, and stays when it is down.
func (i *Instance) Console() string { return i.path("console.log") }

func (i *Instance) path(name string) string { return filepath.Join(i.dir, name) }

// Forward is a port of the machine reached through one of 127.0.0.1.
type Forward struct {
	Host  int `json:"host"`  // port on 127.0.0.1; 0 in a Config: any free one
	Guest int `json:"guest"` // port inside the machine, where something listens on all addresses or on 10.0.2.15
}

const stateFile = "state.json"

// state is state.json: how a running machine was started.
type state struct {
	Token     string    `json:"token"`
	ExecPort  int       `json:"execPort"`
	Forwards  []Forward `json:"forwards"`
	ImageDisk string    `json:"imageDisk,omitempty"`
	Images    string    `json:"images,omitempty"`    // digest of the image set
	Binaries  string    `json:"binaries"`            // digest of what is in guestBin
	FirstProc string    `json:"firstProc,omitempty"` // seconds from kernel start to the first process
	MemoryMiB int       `json:"memoryMiB"`
	CPUs      int       `json:"cpus"`
	Started   time.Time `json:"started"`
}

func readState(path string) (*state, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var s state
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &s, nil
}

func writeState(path string, s *state) error {
	b, err := json.MarshalIndent(s, "", "\t")
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// running answers the state and process of a running machine; ErrDown if it does not run.
func (i *Instance) running() (*state, process, error) {
	p, ok, err := readPID(i.path("qemu.pid"))
	if err != nil {
		return nil, process{}, err
	}
	if !ok || !p.alive() {
		return nil, process{}, fmt.Errorf("instance %s: %w", i.name, ErrDown)
	}
	s, err := readState(i.path(stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, p, fmt.Errorf("instance %s: started without a trace: %w", i.name, err)
	}
	return s, p, err
}

// Address is where a port of the running machine is reached: 127.0.0.1:<port>. ErrDown if it is not running.
func (i *Instance) Address(guestPort int) (string, error) {
	s, _, err := i.running()
	if err != nil {
		return "", err
	}
	for _, f := range s.Forwards {
		if f.Guest == guestPort {
			return loopback(f.Host), nil
		}
	}
	return "", fmt.Errorf("instance %s does not forward port %d", i.name, guestPort)
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// pickPort answers port if it is free on 127.0.0.1, or any free one for 0. QEMU binds it a moment later; should somebody
// be quicker, QEMU says so and does not start.
func pickPort(port int) (int, error) {
	l, err := net.Listen("tcp", loopback(port))
	if err != nil {
		return 0, fmt.Errorf("port %d of 127.0.0.1 is in use: stop what listens there or choose another", port)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func newToken() string { return rand.Text() }

package cell

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Config says where cells are and who lives in them.
type Config struct {
	Parent   string // cgroup of the cells, below the root of cgroup v2; made if it is not there
	FirstUID int    // users FirstUID to FirstUID+UIDs-1 are the cells'; they need not, and should not, have names
	UIDs     int

	// Controllers are what cells are limited by. Fewer than DefaultConfig has are for tests on hosts that lack some.
	Controllers []string
}

// DefaultConfig has a range of users that neither distributions nor container managers hand out (systemd's UIDS-GIDS.md
// lists who uses what).
var DefaultConfig = Config{Parent: "torpor", FirstUID: 1_900_000_000, UIDs: 10_000, Controllers: []string{"cpu", "memory", "pids"}}

func (c Config) validate() error {
	const most = 1<<31 - 1
	if clean := filepath.Clean(c.Parent); clean != c.Parent || clean == "." || clean[0] == '/' || clean[0] == '.' {
		return fmt.Errorf("%q is no name of a cgroup below the root", c.Parent)
	}
	if c.FirstUID < 1 || c.UIDs < 1 || c.FirstUID > most-c.UIDs {
		return fmt.Errorf("there is no range of %d users from %d on", c.UIDs, c.FirstUID)
	}
	return nil
}

// Cells hands out cells. It is safe for concurrent use, by other processes too.
type Cells struct {
	cfg  Config
	root string // of cgroup v2
}

// Cell is a cgroup and the user that it is named for.
type Cell struct {
	cells *Cells
	uid   int
	inode uint64 // of the cgroup's directory; never used again, unlike its name
}

// Open checks the host, makes the parent cgroup, and removes cells whose process has ended unnoticed.
func Open(cfg Config) (*Cells, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	root, err := check(cfg.Controllers)
	if err != nil {
		return nil, err
	}
	if err := delegate(root, cfg.Parent, cfg.Controllers); err != nil {
		return nil, err
	}
	c := &Cells{cfg, root}
	return c, c.sweep()
}

const prefix = "vm-"

func (c *Cells) parent() string { return filepath.Join(c.root, c.cfg.Parent) }

func (c *Cells) dir(uid int) string { return filepath.Join(c.parent(), prefix+strconv.Itoa(uid)) }

// cell returns the cell of a user, which exists.
func (c *Cells) cell(uid int) (*Cell, error) {
	inode, err := inodeOf(c.dir(uid))
	return &Cell{c, uid, inode}, err
}

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// ErrNone says that all users of the range live.
var ErrNone = errors.New("every user set apart for microVMs is in use")

// Start takes a free cell, with the least limits there are, and calls start, which must put a process into it: cgroup is its
// open directory (SysProcAttr.CgroupFD), valid during the call.
func (c *Cells) Start(start func(uid int, cgroup *os.File) error) (_ *Cell, err error) {
	unlock, err := c.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	cell, err := c.make()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(cell.dir()))
		}
	}()
	if err := cell.Limit(0, 1); err != nil {
		return nil, err
	}
	dir, err := os.Open(cell.dir())
	if err != nil {
		return nil, fmt.Errorf("open the cgroup: %w", err)
	}
	defer dir.Close()
	if err := start(cell.uid, dir); err != nil {
		return nil, err
	}
	return cell, nil
}

// Of returns the cell that a process is in, which an earlier agent may have started.
func (c *Cells) Of(pid int) (*Cell, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, fmt.Errorf("find the cgroup of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(raw)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::/") // version 2 (cgroups(7))
		if !ok || filepath.Dir(path) != c.cfg.Parent {
			continue
		}
		if uid, ok := uidOf(filepath.Base(path)); ok {
			return c.cell(uid)
		}
	}
	return nil, fmt.Errorf("process %d is in no cell of %s", pid, c.parent())
}

func uidOf(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, prefix)
	uid, err := strconv.Atoi(digits)
	return uid, ok && err == nil
}

// lock keeps others, agents in other processes included, from making and removing cells of the parent.
func (c *Cells) lock() (unlock func(), err error) {
	f, err := os.Open(c.parent())
	if err != nil {
		return nil, fmt.Errorf("open the parent cgroup: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock the parent cgroup: %w", err), f.Close())
		}
	}
}

// make makes the first cell that is free. Preconditions: the parent is locked.
func (c *Cells) make() (*Cell, error) {
	for uid := c.cfg.FirstUID; uid < c.cfg.FirstUID+c.cfg.UIDs; uid++ {
		err := os.Mkdir(c.dir(uid), 0o755)
		if err == nil {
			return c.cell(uid)
		}
		if !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("make a cgroup: %w", err)
		}
	}
	return nil, ErrNone
}

// sweep removes the cells that nobody is in.
func (c *Cells) sweep() error {
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(c.parent())
	if err != nil {
		return fmt.Errorf("list the cgroups: %w", err)
	}
	for _, e := range entries {
		if _, ok := uidOf(e.Name()); !ok {
			continue
		}
		if err := os.Remove(filepath.Join(c.parent(), e.Name())); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove an empty cgroup: %w", err)
		}
	}
	return nil
}

func (c *Cell) dir() string { return c.cells.dir(c.uid) }

// UID is the user and the group of the cell.
func (c *Cell) UID() int { return c.uid }

// Remove waits for the cell's last process to be gone, and removes the cell. One that is gone already is no error.
func (c *Cell) Remove(ctx context.Context) error {
	for {
		err := c.tryRemove()
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return err
		}
		// A process is found dead an instant before it has left its cgroup.
		if err := c.waitEmpty(ctx); err != nil {
			return fmt.Errorf("wait for the cgroup to be empty: %w", err)
		}
	}
}

func (c *Cell) tryRemove() error {
	unlock, err := c.cells.lock()
	if err != nil {
		return err
	}
	defer unlock()
	inode, err := inodeOf(c.dir())
	if errors.Is(err, os.ErrNotExist) || err == nil && inode != c.inode {
		return nil // somebody swept it, and its user may be another one's by now
	}
	if err == nil {
		err = os.Remove(c.dir())
	}
	if err != nil {
		return fmt.Errorf("remove the cgroup: %w", err)
	}
	return nil
}

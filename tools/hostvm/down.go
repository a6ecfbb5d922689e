package hostvm

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"time"
)

// shutdownBudget is how long the machine may take to end its processes and unmount its disks before QEMU is stopped.
const shutdownBudget = 40 * time.Second

// Down shuts the machine down: its processes are told to end, its disks are unmounted, QEMU ends. A machine that does
// not follow is stopped all the same. The data disk and the console log stay, or with purge go too. It is no error if
// the machine is not running.
func (i *Instance) Down(ctx context.Context, purge bool) error {
	if !exists(i.dir) {
		return nil
	}
	l, err := lock(ctx, i.path("lock"))
	if err != nil {
		return err
	}
	defer l.Close()
	_, p, err := i.running()
	if err == nil {
		i.askToEnd(ctx)
		p.wait(ctx, shutdownBudget)
	}
	if p.pid != 0 {
		if err := p.stop(ctx); err != nil {
			return err
		}
	}
	if err != nil && !errors.Is(err, ErrDown) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if purge {
		return os.RemoveAll(i.dir)
	}
	return i.tidy()
}

// askToEnd tells init to shut down. The answer, if one comes, says nothing: the machine's end is watched for anyway.
func (i *Instance) askToEnd(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, _ = i.Exec(ctx, "kill -USR2 1", nil, io.Discard, io.Discard)
}

// tidy removes what belongs to one start of the machine.
func (i *Instance) tidy() error {
	var errs []error
	for _, n := range []string{"qemu.pid", stateFile, "initrd", "qemu.log"} {
		if err := os.Remove(i.path(n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

package base

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"torpor/images/command"
)

// Layout fixes all that mke2fs would take from the clock, from chance or from the machine's configuration.
type Layout struct {
	Bytes      int64
	Inodes     int
	JournalMiB int
	UUID       string
	HashSeed   string // of the directory index
	Label      string
	Time       int64 // Unix seconds: of the file system and of every inode's change and creation
}

// features is the whole list, whatever the machine's mke2fs.conf says. All is known to Linux 6.1.
// metadata_csum makes the guest notice what a fault in the copy-on-write layer below it would do to its metadata.
const features = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"

// write makes image an ext4 file system with the content of tree. Files of the tree that were changed after started were
// made by the build and are stamped with l.Time; older stamps come from packages and are kept, since Python compares them
// with what its compiled files say.
//
// mke2fs could copy the tree itself but does so in the order in which the directory happens to list its files; a debugfs
// script in sorted order gives the same inode numbers and blocks every time.
func (l Layout) write(ctx context.Context, image, tree string, started time.Time) error {
	entries, err := scan(tree)
	if err != nil {
		return err
	}
	var script bytes.Buffer
	if err := writeScript(&script, tree, entries, started.Unix()); err != nil {
		return err
	}
	if err := l.format(ctx, image); err != nil {
		return err
	}
	if err := l.populate(ctx, image, &script); err != nil {
		return err
	}
	if _, err := command.Run(ctx, l.tool("e2fsck", "-f", "-n", image)); err != nil {
		return fmt.Errorf("the new file system is not sound: %w", err)
	}
	return nil
}

func (l Layout) tool(name string, args ...string) command.Command {
	return command.Command{Name: name, Args: args, Env: []string{"E2FSPROGS_FAKE_TIME=" + strconv.FormatInt(l.Time, 10)}}
}

// format makes the empty file system in a sparse file. Its inode tables and journal count as zeroed, which a fresh file's
// holes are: so there is nothing left for the first mount to do.
func (l Layout) format(ctx context.Context, image string) error {
	f, err := os.OpenFile(image, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("make the disk image: %w", err)
	}
	if err := errors.Join(f.Truncate(l.Bytes), f.Close()); err != nil {
		return fmt.Errorf("make the disk image: %w", err)
	}
	cmd := l.tool("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-e", "remount-ro",
		"-N", strconv.Itoa(l.Inodes), "-J", "size="+strconv.Itoa(l.JournalMiB), "-O", features, "-U", l.UUID, "-L", l.Label,
		"-E", "hash_seed="+l.HashSeed+",root_owner=0:0,nodiscard,lazy_itable_init=0,lazy_journal_init=0,assume_storage_prezeroed=1",
		image)
	cmd.Env = append(cmd.Env, "MKE2FS_CONFIG=/dev/null")
	_, err = command.Run(ctx, cmd)
	return err
}

// populate runs a debugfs script. debugfs goes on after an error and exits with 0, so what it says is what counts.
func (l Layout) populate(ctx context.Context, image string, script *bytes.Buffer) error {
	cmd := l.tool("debugfs", "-w", "-f", "-", image)
	cmd.Stdin = script
	out, err := command.Run(ctx, cmd)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(out.Stderr)) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "debugfs "+versionPrefix) {
			return fmt.Errorf("debugfs: %s", line)
		}
	}
	return nil
}

// versionPrefix begins the version in debugfs's banner, the one line it always prints.
const versionPrefix = "1."

// imagePath is an entry's path in the image.
func imagePath(rel string) string { return filepath.Join("/", rel) }

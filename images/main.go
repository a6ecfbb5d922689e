// Command torpor-images builds the guest image set that every sandbox starts from, and inspects and verifies one.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"torpor/images/build"
	"torpor/images/cache"
	"torpor/images/imageset"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := root().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "torpor-images: "+explain(err))
		os.Exit(1)
	}
}

// explain is the one sentence that tells what to do.
func explain(err error) string {
	if errors.Is(err, unix.ENOSPC) {
		return "the disk is full: free some space or set TORPOR_CACHE to a directory on a larger one (" + err.Error() + ")"
	}
	if errors.Is(err, context.Canceled) {
		return "stopped; what was finished is kept, run it again to go on"
	}
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "torpor-images",
		Short:         "Build, inspect and verify the guest image set",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.AddCommand(buildCommand(), inspectCommand(), verifyCommand())
	return cmd
}

func buildCommand() *cobra.Command {
	var out string
	var o build.Options
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build the image set, or find it in the cache, and print its directory",
		Long: "Build makes kernel, initramfs and root file system from Debian packages and prints the directory of the set.\n" +
			"What was built once is kept in the cache and found there without asking anybody; --refresh looks for newer packages.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := zerolog.New(zerolog.ConsoleWriter{Out: cmd.ErrOrStderr(), NoColor: true}).With().Timestamp().Logger()
			dir, err := build.Build(cmd.Context(), log, o)
			if err != nil {
				return err
			}
			if out != "" {
				if err := linkOut(out, dir); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), dir)
			return err
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "make this path a symbolic link to the set")
	cmd.Flags().StringVar(&o.Envd, "envd", besideUs("envd"), "the envd binary, the guest's init")
	cmd.Flags().StringVar(&o.Cache, "cache", defaultCache(), "cache directory (also TORPOR_CACHE)")
	cmd.Flags().BoolVar(&o.Refresh, "refresh", false, "take the newest kernel and packages and build anew")
	return cmd
}

// linkOut makes out name the set. A directory or file that is there already is somebody's and is not touched.
func linkOut(out, dir string) error {
	if info, err := os.Lstat(out); err == nil && info.Mode()&os.ModeSymlink == 0 {
		return fmt.Errorf("%s exists and is not a link made by this command: remove it or choose another --out", out)
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return fmt.Errorf("make the way to --out: %w", err)
	}
	if err := cache.ReplaceSymlink(out, dir); err != nil {
		return fmt.Errorf("link --out: %w", err)
	}
	return nil
}

func inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect DIR",
		Short: "Print what a set is made of",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := imageset.Read(args[0])
			if err != nil {
				return err
			}
			return inspect(cmd.OutOrStdout(), args[0], m)
		},
	}
}

func inspect(w io.Writer, dir string, m imageset.Manifest) error {
	fmt.Fprintf(w, "name     %s\ndigest   %s\nkernel   %s\nenvd     %s\ncmdline  %s\n", m.Name, m.Digest, m.Kernel, m.EnvdVersion, m.Cmdline)
	for _, name := range m.Files() {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, name), &st); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Fprintf(w, "%-12s %11d bytes, %9d on disk, %s\n", name, st.Size, st.Blocks*512, m.Parts[name])
	}
	return nil
}

func verifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify DIR",
		Short: "Read all of a set and compare the digests",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := imageset.Verify(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "ok", m.Digest)
			return err
		},
	}
}

func besideUs(name string) string {
	exe, err := os.Executable()
	if err != nil {
		return name
	}
	return filepath.Join(filepath.Dir(exe), name)
}

// defaultCache is ${TORPOR_CACHE:-~/.cache/torpor}.
func defaultCache() string {
	if dir := os.Getenv("TORPOR_CACHE"); dir != "" {
		return dir
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root" // a service without HOME
	}
	return filepath.Join(home, ".cache/torpor")
}

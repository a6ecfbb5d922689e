package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"torpor/tools/rest"
)

func (a *app) execCommand() *cobra.Command {
	var user, cwd string
	var env []string
	var interactive bool
	cmd := &cobra.Command{
		Use:   "exec ID -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox; its output, and its exit code, become this one's",
		Long: "Run a command in a sandbox. Its output is passed through as it comes and its exit code becomes this one's.\n" +
			"A single COMMAND is a line for the login shell; with arguments it is run as it stands.\n" +
			"A paused sandbox is woken if it was made with auto-resume.",
		Args: cobra.MinimumNArgs(2),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			command := rest.Command{Argv: args[1:], User: user, Cwd: cwd, Stdout: cmd.OutOrStdout(), Stderr: cmd.ErrOrStderr()}
			vars, err := parseEnv(env)
			if err != nil {
				return err
			}
			command.Env = vars
			if interactive {
				command.Stdin = cmd.InOrStdin()
			}
			sb, err := c.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			code, err := c.Exec(cmd.Context(), sb.Sandbox, command)
			if err != nil {
				if sb.State == "paused" {
					return fmt.Errorf("%w (it is paused: `torpor resume %s` wakes it)", err, args[0])
				}
				return err
			}
			if code != 0 {
				return exitError(code)
			}
			return nil
		}),
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user to run as (default: the sandbox's)")
	cmd.Flags().StringVarP(&cwd, "cwd", "C", "", "directory to run in (default: the user's home)")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "variable NAME=VALUE for this command (repeatable)")
	cmd.Flags().BoolVarP(&interactive, "stdin", "i", false, "pass standard input to the command")
	return cmd
}

func parseEnv(pairs []string) (map[string]string, error) {
	vars := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--env %q: write NAME=VALUE", pair)
		}
		vars[name] = value
	}
	return vars, nil
}

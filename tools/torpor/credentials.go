package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

// credentials is what `torpor up` leaves for the other commands, readable by its owner only.
type credentials struct {
	APIURL     string `json:"apiURL"`
	SandboxURL string `json:"sandboxURL"`
	APIKey     string `json:"apiKey"`
}

// lines is the form `torpor up` prints last and `torpor env` exports.
func (c credentials) lines(prefix string) string {
	return fmt.Sprintf("%[1]sE2B_API_URL=%[2]s\n%[1]sE2B_SANDBOX_URL=%[3]s\n%[1]sE2B_API_KEY=%[4]s\n", prefix, c.APIURL, c.SandboxURL, c.APIKey)
}

func (a *app) credentialsFile() string {
	state := cmp.Or(a.env("XDG_STATE_HOME"), filepath.Join(cmp.Or(a.env("HOME"), "/root"), ".local/state"))
	return filepath.Join(state, "torpor", "credentials.json")
}

// loadCredentials returns the zero value where nothing was written.
func (a *app) loadCredentials() (credentials, error) {
	var c credentials
	raw, err := os.ReadFile(a.credentialsFile())
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("reading the credentials `torpor up` wrote: %w", err)
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return c, fmt.Errorf("%s is damaged (%w): remove it and run `torpor up` again", a.credentialsFile(), err)
	}
	return c, nil
}

// saveCredentials replaces the file in one step.
func (a *app) saveCredentials(c credentials) error {
	file := a.credentialsFile()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fmt.Errorf("keeping the credentials: %w", err)
	}
	raw, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("keeping the credentials: %w", err)
	}
	tmp := file + ".tmp"
	if err := os.WriteFile(tmp, append(raw, '\n'), 0o600); err != nil {
		return fmt.Errorf("keeping the credentials: %w", err)
	}
	return os.Rename(tmp, file)
}

// dropCredentials forgets them if they name apiURL: what is down must not be found.
func (a *app) dropCredentials(apiURL string) error {
	c, err := a.loadCredentials()
	if err != nil || c.APIURL != apiURL {
		return err
	}
	return os.Remove(a.credentialsFile())
}

func (a *app) envCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: `Print the E2B variables as shell exports: eval "$(torpor env)"`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.loadCredentials()
			if err != nil {
				return err
			}
			if c.APIKey == "" {
				return errors.New("nothing is up that this user brought up; run `torpor up` first")
			}
			if strings.ContainsAny(c.APIURL+c.SandboxURL+c.APIKey, " '\"$`\\\n") {
				return fmt.Errorf("%s holds characters no credential has: remove it and run `torpor up` again", a.credentialsFile())
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), c.lines("export "))
			return err
		},
	}
}

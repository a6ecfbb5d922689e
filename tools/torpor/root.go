package main

import (
	"cmp"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"torpor/tools/rest"
)

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "torpor",
		Short:         "microVM sandboxes that sleep and wake with their memory",
		Version:       versionString(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&a.apiURL, "api-url", "", "base URL of the API (default $E2B_API_URL, then what torpor up wrote)")
	root.PersistentFlags().StringVar(&a.apiKey, "api-key", "", "API key (default $E2B_API_KEY, then what torpor up wrote)")
	root.AddCommand(
		a.upCommand(), a.downCommand(), a.envCommand(), a.doctorCommand(),
		a.psCommand(), a.execCommand(), a.pauseCommand(), a.resumeCommand(), a.killCommand(),
		a.forkCommand(), a.rollbackCommand(),
		a.logsCommand(), a.stateCommand(), a.eventsCommand(),
		a.snapshotCommand(), a.diskCommand(),
	)
	return root
}

// headerBudget is how long an answer may take to begin: a wake on an emulated host takes tens of seconds.
const headerBudget = 15 * time.Minute

// client finds the API: flags first, then the environment, then what `torpor up` wrote.
func (a *app) client() (*rest.Client, error) {
	saved, err := a.loadCredentials()
	if err != nil {
		return nil, err
	}
	api := cmp.Or(a.apiURL, a.env("E2B_API_URL"), saved.APIURL, "http://127.0.0.1:3000")
	sandbox := cmp.Or(a.apiURL, a.env("E2B_SANDBOX_URL"), api)
	key := cmp.Or(a.apiKey, a.env("E2B_API_KEY"), saved.APIKey)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil // the API is ours and near; a proxy meant for the web must not see the key
	transport.ResponseHeaderTimeout = headerBudget
	return &rest.Client{API: api, Sandbox: sandbox, Key: key, HTTP: &http.Client{Transport: transport}}, nil
}

func versionString() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+"
		}
	}
	return cmp.Or(revision, "unversioned") + dirty
}

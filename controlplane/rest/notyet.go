package rest

import (
	"net/http"

	"torpor/api/apierr"
)

// notYet lists E2B's routes that this version does not serve. Saying so is better than a 404, which SDKs read as
// "the sandbox does not exist".
func notYet() []route {
	var routes []route
	for _, line := range []struct{ method, pattern, feature string }{
		{"PUT", "/sandboxes/{sandboxID}/network", "updating network rules"},
		{"GET", "/sandboxes/{sandboxID}/metrics", "metrics"},
		{"GET", "/sandboxes/metrics", "metrics"},
		{"GET", "/sandboxes/{sandboxID}/logs", "sandbox logs"},
		{"GET", "/v2/sandboxes/{sandboxID}/logs", "sandbox logs"},
		{"GET", "/templates", "listing templates"},
		{"GET", "/templates/aliases/{alias}", "template aliases"},
		{"POST", "/templates/tags", "template tags"},
		{"DELETE", "/templates/tags", "template tags"},
		{"GET", "/templates/{templateID}/tags", "template tags"},
		{"POST", "/v3/templates", "building templates"},
		{"POST", "/v2/templates/{templateID}/builds/{buildID}", "building templates"},
		{"GET", "/templates/{templateID}/builds/{buildID}/status", "building templates"},
		{"GET", "/templates/{templateID}/files/{hash}", "building templates"},
	} {
		routes = append(routes, newRoute(line.method, line.pattern, func(http.ResponseWriter, *http.Request) error {
			return apierr.New(apierr.NotImplemented, "this version of Torpor does not serve %s", line.feature)
		}))
	}
	return routes
}
